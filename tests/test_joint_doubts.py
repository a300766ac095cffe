"""Joint caches in the hands of code that knows nothing of them."""

import threading

import mlx.core as mx
import tolerance
from mlx_lm.models import llama
from mlx_lm.models.cache import KVCache
from test_cache_joint import patched, started, steps  # noqa: F401
from test_traced import model

import mlx_phase
from mlx_phase import cache_joint, joint_kinds
from mlx_phase.cache_joint import JOINT


def test_classes_of_joint_caches_make_plain_ones(patched):  # noqa: F811
    c = started(patched)[0]
    kind = type(c)
    assert kind is JOINT and kind.__module__ == KVCache.__module__
    new, same = kind(), kind.from_state(c.state)
    assert type(new) is type(same) is KVCache and new.empty() and new.offset == 0
    assert same.keys is c.keys and same.offset == 22


def test_threads_that_ask_wait_for_the_step(patched, monkeypatch):  # noqa: F811
    want = steps(patched, started(patched), 22, [1, 1])
    caches, threads = started(patched), []
    buffers = joint_kinds._Joint.all_buffers

    def asked(self, of):
        found = buffers(self, of)
        threads.append(threading.Thread(target=ask))
        threads[-1].start()
        threads[-1].join(0.1)
        return found

    def ask():
        for c in caches:
            try:
                assert c.keys.shape[0] == 1
            except RuntimeError:  # not evaluated yet, and not by another thread
                evaluated.wait(5)
                assert c.keys.shape[0] == 1

    evaluated = threading.Event()
    monkeypatch.setattr(joint_kinds._Joint, "all_buffers", asked)
    first = steps(patched, caches, 22, [1])
    evaluated.set()
    monkeypatch.undo()
    threads[0].join()
    assert len(threads) == 1 and [type(c) for c in caches] == [KVCache] * 2
    both = mx.concatenate([first, steps(patched, caches, 23, [1])], axis=1)
    tolerance.assert_bits(both, want)


class Sets(llama.LlamaModel):
    """Sets keys, as models do that must wait for what they send."""

    def __call__(self, inputs, cache=None, *args):
        h = super().__call__(inputs, cache, *args)
        cache[-1].keys = 2 * cache[-1].keys
        return h


def test_keys_that_a_model_sets_are_kept(monkeypatch):
    m = model("llama", mx.bfloat16)
    m.model.__class__ = Sets
    mlx_phase.patch(m, check=False)
    have = steps(m, started(m), 22, [1, 3])
    assert m._steps._apart == {1}
    monkeypatch.setattr(cache_joint, "TIMES", 0)
    tolerance.assert_bits(have, steps(m, started(m), 22, [1, 3]))
