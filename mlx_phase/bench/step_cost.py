"""What a decode step asks of the GPU: launches, and how long its kernels take."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generation_stream

from .gpu_time import ProfileError, Recorder
from .kv_cache import KV, PromptCache, prefill

# Nodes of a graph that only say how memory is read, unless something must be copied.
VIEWS = {"Broadcast", "BroadcastAxes", "Squeeze", "ExpandDims", "Reshape", "Flatten"}
VIEWS |= {"Unflatten", "Transpose", "AsStrided", "Slice", "Split", "View", "Depends"}
VIEWS |= {"StopGradient", "NumberOfElements"}
STEPS = 4


class Decoding:
    """Decode steps of a model after a prompt."""

    def __init__(self, model: nn.Module, prompt: Sequence[int], kv: KV | None):
        self.model, self.cache = model, PromptCache(model, kv)
        with mx.stream(generation_stream):
            logits = prefill(model, mx.array([list(prompt)]), self.cache)
            self.token = mx.argmax(logits[:, -1], axis=-1)
        self.finish()

    def step(self) -> mx.array:
        """The next token, not evaluated yet."""
        with mx.stream(generation_stream):
            logits = self.model(self.token[None], cache=self.cache.layers)
            self.token = mx.argmax(logits[:, -1], axis=-1)
        return self.token

    def finish(self) -> None:
        """Compute all that was asked for."""
        # Not the caches: to ask for their keys changes what the next step does.
        mx.eval(self.token)


def graph_launches(decoding: Decoding) -> int:
    """Nodes of a step's graph that compute something: a launch each, at least."""
    decoding.step()
    text = io.StringIO()
    mx.export_to_dot(text, decoding.token)
    decoding.finish()
    names = re.findall(r'label ?= ?"(\w+)"', text.getvalue())
    return sum(name not in VIEWS for name in names)


def profiled(decoding: Decoding, events: Recorder) -> tuple[int, float]:
    """Kernels of a step and their microseconds on the GPU, means of a few steps.

    ProfileError if the records do not repeat.
    """

    def run() -> None:
        for _ in range(STEPS):
            decoding.step()
            decoding.finish()

    run()  # captures and compiles what there is
    found = events(run)
    launches, rest = divmod(len(found), STEPS)
    if rest:
        raise ProfileError(f"{STEPS} steps gave {len(found)} kernels")
    return launches, sum(event.us for event in found) / STEPS


def step_cost(
    model: nn.Module,
    prompt: Sequence[int],
    kv: KV | None,
    events: Recorder | None,
) -> tuple[int, float | None]:
    """Launches of a decode step, and the microseconds of its kernels on the GPU.

    events: the profiler; without it, or where it fails, launches are counted in the
    graph and times are None. Copies of a cache that grows are no part of it.
    """
    decoding = Decoding(model, prompt, kv)
    decoding.step()
    decoding.finish()
    if events is not None:
        try:
            return profiled(decoding, events)
        except ProfileError:
            pass
    return graph_launches(decoding), None
