"""Prompts of a patched model on the prefill kernels, whole and in chunks."""

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache
from test_traced import model

import mlx_phase
from mlx_phase import ops

LENGTH, STEPS = 600, 8
PROMPT = mx.random.randint(0, 96, (1, LENGTH), key=mx.random.key(7))


def answer(m, chunks: list[int]) -> tuple[np.ndarray, list[int]]:
    """Logits of the prompt, taken in chunks, and the greedy tokens after it."""
    cache, at, outs = make_prompt_cache(m), 0, []
    for length in chunks:
        outs.append(m(PROMPT[:, at : at + length], cache=cache))
        mx.eval(outs[-1], [c.state for c in cache])
        at += length
    logits = mx.concatenate(outs, axis=1)
    tokens = [mx.argmax(logits[0, -1]).item()]
    for _ in range(STEPS - 1):
        tokens.append(mx.argmax(m(mx.array([tokens[-1:]]), cache=cache)[0, -1]).item())
    return np.array(logits[0].astype(mx.float32)), tokens


def test_a_long_prompt_whole_and_in_chunks():
    """Within float32's tolerance of stock, and the same continuation."""
    m = model("llama")
    right, tokens = answer(m, [LENGTH])
    with mlx_phase.patched(m, check=False):
        for chunks in ([LENGTH], [17, 256, 327]):
            ops.reset_served()
            logits, continued = answer(m, chunks)
            names = {n.split()[0] for n in ops.served().kernels}
            assert {"qmm", "qmv_qkv"} <= names
            assert np.abs(logits - right).max() < 1e-4 * np.abs(right).max()
            assert continued == tokens
