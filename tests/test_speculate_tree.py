"""Tree drafts: mask, positions and the confirmed path, through our attention."""

import random

import mlx.core as mx
import numpy as np
import pytest
import ref_attention
import tolerance

from mlx_phase import attention_ops
from mlx_phase.speculate import tree_accept, tree_mask, tree_of, tree_positions


def test_paths_share_their_beginnings():
    tokens, parents = tree_of([[5, 6, 7], [5, 8], [9], [5, 6]], last=4)
    assert tokens == [4, 5, 6, 7, 8, 9]
    assert parents == [-1, 0, 1, 2, 1, 0]
    assert tree_positions(parents, 10).tolist() == [10, 11, 12, 13, 12, 11]
    assert tree_of([], last=4) == ([4], [-1])


def test_mask_shows_the_past_and_the_ancestors():
    mask = np.array(tree_mask([-1, 0, 1, 0], 2))
    assert mask.dtype == bool
    assert mask.astype(int).tolist() == [
        [1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 0, 0],
        [1, 1, 1, 1, 1, 0],
        [1, 1, 1, 0, 0, 1],
    ]


@pytest.mark.parametrize("parents", [[], [0], [-1, -1], [-1, 1], [-1, 2, 0], [-1, -2]])
def test_parents_that_are_no_tree_are_refused(parents):
    for function in (tree_mask, tree_positions):
        with pytest.raises(ValueError, match="parents must be -1 for node 0"):
            function(parents, 3)


def test_the_confirmed_path_is_found():
    tokens, parents = tree_of([[5, 6, 7], [5, 8]], last=4)
    #                  after: 4  5  6  7  8
    assert tree_accept(tokens, parents, [5, 8, 0, 0, 3]) == [0, 1, 4]
    assert tree_accept(tokens, parents, [6, 8, 0, 0, 3]) == [0]
    assert tree_accept(tokens, parents, [5, 6, 7, 1, 0]) == [0, 1, 2, 3]


def random_tree(nodes: int, seed: int) -> list[int]:
    pick = random.Random(seed)
    return [-1, *(pick.randrange(i) for i in range(1, nodes))]


def attention_inputs(nodes: int, past: int, Hq=4, Hkv=2, D=64):
    keys = iter(mx.random.split(mx.random.key(nodes), 3))
    q = mx.random.normal((1, Hq, nodes, D), key=next(keys))
    k, v = (mx.random.normal((1, Hkv, past + nodes, D), key=next(keys)) for _ in "kv")
    return q, k, v


@pytest.mark.parametrize(("nodes", "past"), [(7, 0), (7, 37)])
def test_attention_takes_the_mask_of_a_tree(engaged, nodes, past):
    parents = random_tree(nodes, past)
    q, k, v = attention_inputs(nodes, past)
    mask = tree_mask(parents, past)
    with engaged("sdpa"):
        have = attention_ops.sdpa(q, k, v, scale=0.125, mask=mask)
    want = ref_attention.attention(q, k, v, 0.125, mask=mask)
    np.testing.assert_allclose(np.array(have), want, atol=2e-6)


def test_a_tree_of_one_path_has_the_bits_of_a_causal_step(engaged):
    q, k, v = attention_inputs(7, 37)
    chain = list(range(-1, 6))
    with engaged("sdpa"):
        have = attention_ops.sdpa(q, k, v, scale=0.125, mask=tree_mask(chain, 37))
        want = attention_ops.sdpa(q, k, v, scale=0.125, mask="causal")
    tolerance.assert_bits(have, want)
    assert tree_positions(chain, 37).tolist() == list(range(37, 44))


def test_each_path_of_a_tree_attends_like_the_path_alone(engaged):
    """Rotated by tree positions, each branch sees what it would see as plain text."""
    past, paths = 21, [[1, 2, 3], [1, 4], [5]]
    tokens, parents = tree_of(paths, last=0)
    q, k, v = attention_inputs(len(tokens), past)
    rope = {"dims": 64, "traditional": False, "base": 1e4, "scale": 1.0}

    def rotate(x: mx.array, positions: mx.array) -> mx.array:
        # Nodes are the batch: rope takes an offset for each sequence.
        x = x.transpose(2, 1, 0, 3)
        return mx.fast.rope(x, offset=positions, **rope).transpose(2, 1, 0, 3)

    old, new = k[:, :, :past], k[:, :, past:]
    old = mx.fast.rope(old, offset=0, **rope)
    at = tree_positions(parents, past)
    keys = mx.concatenate([old, rotate(new, at)], axis=2)
    mask = tree_mask(parents, past)
    with engaged("sdpa"):
        have = attention_ops.sdpa(rotate(q, at), keys, v, scale=0.125, mask=mask)
    for path in paths:
        nodes = mx.array(tree_accept(tokens, parents, follow(tokens, parents, path)))
        rows = [mx.arange(past), past + nodes]
        ks = mx.fast.rope(k[:, :, mx.concatenate(rows)], offset=0, **rope)
        qs = mx.fast.rope(q[:, :, nodes], offset=past, **rope)
        vs = v[:, :, mx.concatenate(rows)]
        want = ref_attention.attention(qs, ks, vs, 0.125, causal=True)
        np.testing.assert_allclose(np.array(have[:, :, nodes]), want, atol=3e-6)


def follow(tokens: list[int], parents: list[int], path: list[int]) -> list[int]:
    """Choices of a model that says ``path``."""
    said = [0, *path, -1]
    return [said[said.index(t) + 1] if t in said else -1 for t in tokens]
