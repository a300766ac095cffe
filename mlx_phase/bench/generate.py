"""One generation with the time at which each token arrived, and what it read."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step, generation_stream, wired_limit
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from .. import ops
from . import BenchError
from .kv_cache import KV, PromptCache, prefill
from .measure import Clock, percentile

# A changed order of additions moves a logit by some units in the last place of the
# largest one, in the model's dtype. A gap within this many is a near tie, no error.
NEAR_TIE_ULPS = 4
NEAR_TIE_FLOOR = 1e-3
_ULP = {mx.float16: 2.0**-10, mx.bfloat16: 2.0**-7, mx.float32: 2.0**-23}


@dataclass
class Run:
    """Tokens of one generation and when each arrived (seconds after the start)."""

    prompt_tokens: int
    tokens: list[int] = field(default_factory=list)
    arrivals: list[float] = field(default_factory=list)
    logprobs: list[mx.array] = field(default_factory=list)
    peak_bytes: int = 0
    kv_bytes: int = 0
    # Calls of the prompt's chunks: all of it but the last token, which is a step.
    prompt_served: dict[str, int] = field(default_factory=dict)

    @property
    def ttft(self) -> float:
        """Seconds to the first token."""
        return self.arrivals[0]

    @property
    def step(self) -> float:
        """Mean seconds per decode step: (t_last - t_first) / (tokens - 1)."""
        return (self.arrivals[-1] - self.arrivals[0]) / (len(self.arrivals) - 1)

    def latency(self, percent: float) -> float:
        """Percentile of the inter-token latencies, seconds."""
        pairs = zip(self.arrivals, self.arrivals[1:], strict=False)
        return percentile([b - a for a, b in pairs], percent)


def generate(
    model: nn.Module,
    prompt: Sequence[int],
    tokens: int,
    *,
    clock: Clock = time.perf_counter,
    keep_logprobs: bool = False,
    kv: KV | None = None,
    steps: Callable[..., Iterable[tuple[int, Any]]] = generate_step,
    on_token: Callable[[], object] = lambda: None,
) -> Run:
    """Greedy generation of ``tokens`` tokens through mlx-lm's own pipelined loop.

    The end-of-text token does not stop it, so every run does the same work.
    ``keep_logprobs`` keeps each step's log probabilities [vocab] for `compare`;
    ``kv`` quantises the cache (`PromptCache`).
    """
    run = Run(prompt_tokens=len(prompt))
    prompt_cache = PromptCache(model, kv)
    cache, options = prompt_cache.layers, prompt_cache.options
    ids = mx.array(list(prompt))
    mx.eval(ids)
    marks: list[Counter] = []

    def progress(done: int, total: int) -> None:
        if done < total:  # at the start and after each chunk
            marks.append(Counter(ops.served()))

    if steps is generate_step:
        options["prompt_progress_callback"] = progress
    with wired_limit(model, [generation_stream]):
        mx.synchronize()
        mx.clear_cache()
        mx.reset_peak_memory()
        stepper = steps(ids, model, max_tokens=tokens, prompt_cache=cache, **options)
        start = clock()
        for token, logprobs in stepper:
            run.arrivals.append(clock() - start)
            run.tokens.append(int(token))
            if keep_logprobs:
                run.logprobs.append(logprobs)
            on_token()
        # The loop runs one step ahead; its tail must not spill into the next run.
        mx.synchronize(generation_stream)
    if marks:
        run.prompt_served = dict(marks[-1] - marks[0])
    run.peak_bytes = mx.get_peak_memory()
    run.kv_bytes = _mean_kv_bytes(cache, tokens)
    return run


def _mean_kv_bytes(cache: list[Any], tokens: int) -> int:
    """Cache bytes that a decode step reads, averaged over the generated tokens."""
    total = 0.0
    for entry in cache:
        if hasattr(entry, "caches"):  # a layer with several
            total += _mean_kv_bytes(list(entry.caches), tokens)
            continue
        if getattr(entry, "keys", entry) is None:
            continue  # nothing in it: mlx-lm 0.31 has no state of that
        # Buffers [..., allocated, head_dim] are read up to the offset; a state without
        # one (recurrent layers) is read whole.
        offset = getattr(entry, "offset", None)
        for _, leaf in tree_flatten(list(entry.state)):
            if not isinstance(leaf, mx.array):
                continue
            share = 1.0
            if isinstance(offset, int) and leaf.ndim > 1 and leaf.shape[-2]:
                share = min(1.0, (offset - tokens / 2) / leaf.shape[-2])
            total += leaf.nbytes * share
    return int(total)


def decode_weight_bytes(model: nn.Module, config: dict[str, Any]) -> int:
    """Bytes of weights that one token reads.

    All parameters, except: an input embedding that is no head counts one row, and of
    a layer of experts only the share that one token is routed to counts.
    """
    total = sum(leaf.nbytes for _, leaf in tree_flatten(model.parameters()))
    layers = tree_flatten(model.leaf_modules(), is_leaf=nn.Module.is_module)
    has_head = any(name.split(".")[-1] == "lm_head" for name, _ in layers)
    tied = not has_head and config.get("tie_word_embeddings", True)
    for _, layer in layers:
        size = sum(leaf.nbytes for _, leaf in tree_flatten(layer.parameters()))
        if isinstance(layer, (nn.Embedding, nn.QuantizedEmbedding)) and not tied:
            total -= size - size // layer["weight"].shape[0]
        elif isinstance(layer, (SwitchLinear, QuantizedSwitchLinear)):
            experts = layer["weight"].shape[0]
            total -= size - size * min(_active_experts(config), experts) // experts
    return total


def weight_format(model: nn.Module) -> dict[str, Any]:
    """``bits``, ``group`` and ``mode`` that most bytes of the weights have."""
    sizes: Counter[tuple[int, int, str]] = Counter()
    for _, layer in tree_flatten(model.leaf_modules(), is_leaf=nn.Module.is_module):
        weight = layer.get("weight")
        if weight is None or weight.ndim < 2:
            continue
        if layer.get("scales") is None:
            form = (8 * weight.itemsize, 0, "none")
        else:
            form = (layer.bits, layer.group_size, getattr(layer, "mode", "affine"))
        sizes[form] += weight.nbytes
    if not sizes:
        return {}
    return dict(zip(("bits", "group", "mode"), sizes.most_common(1)[0][0], strict=True))


def _active_experts(config: dict[str, Any]) -> int:
    for name in ("num_experts_per_tok", "num_experts_per_token", "top_k_experts"):
        value = config.get(name) or config.get("text_config", {}).get(name)
        if value:
            return int(value)
    raise BenchError(
        "bytes per token of this mixture-of-experts model are unknown: its config has "
        "no num_experts_per_tok"
    )


@dataclass(frozen=True)
class Comparison:
    """Whether two greedy runs agree; ``failure`` says why the row must not count."""

    text: str
    failure: str | None = None


def compare(
    stock: Run, patched: Run, names: tuple[str, str] = ("stock", "patched")
) -> Comparison:
    """Compare tokens; at the first difference show how close the candidates were.

    names: what the text calls the two runs.
    """
    pairs = list(zip(stock.tokens, patched.tokens, strict=True))
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    if at is None:
        return Comparison("yes")
    a, b = pairs[at]
    one, two = names
    text = f"differ at token {at + 1}: {one} {a}, {two} {b}"
    if not (stock.logprobs and patched.logprobs):
        return Comparison(text, f"tokens {text}")
    ours = stock.logprobs[at]
    ulp = _ULP.get(ours.dtype, 0.0)
    ref = ours.astype(mx.float32)
    gap = (ref[a] - ref[b]).item()
    new = patched.logprobs[at].astype(mx.float32)
    back = (new[b] - new[a]).item()
    text += f" (log-probability gap: {one} {gap:.3g}, {two} {back:.3g}"
    scale = (ref.max() - ref.min()).item()
    if max(gap, back) <= max(NEAR_TIE_FLOOR, NEAR_TIE_ULPS * ulp * scale):
        return Comparison(f"{text}, a near tie in this dtype)")
    return Comparison(f"{text})", f"tokens {text})")


def host_step(
    model: nn.Module,
    prompt: Sequence[int],
    steps: int,
    *,
    kv: KV | None = None,
    clock: Clock = time.perf_counter,
) -> tuple[list[float], list[float]]:
    """Host seconds of decode steps on an idle device: (build, evaluate) samples.

    Build is Python making the graph, evaluate is MLX walking and encoding it; the
    device's own time is not in either, as long as it accepts work without waiting.
    """
    cache = PromptCache(model, kv)
    with mx.stream(generation_stream), contextlib.ExitStack() as stack:
        stack.enter_context(wired_limit(model, [generation_stream]))
        logits = prefill(model, mx.array([list(prompt)]), cache)
        token = mx.argmax(logits[:, -1], axis=-1)
        mx.eval(token)
        build, evaluate = [], []
        for _ in range(steps):
            start = clock()
            logits = model(token[None], cache=cache.layers)
            token = mx.argmax(logits[:, -1], axis=-1)
            built = clock()
            mx.async_eval(token)
            evaluate.append(clock() - built)
            build.append(built - start)
            mx.eval(token)
    return build, evaluate
