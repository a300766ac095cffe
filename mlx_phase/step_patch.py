"""Put a model's decode steps into one trace with fused blocks, checked here first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.cache import KVCache

from .attention_step import attention_of_step
from .block import Fused, adopt_block, fused, read, release_block, step, why_not
from .launch.fused import ACTIVATIONS
from .rotary import same_rope
from .routes import counted
from .step_cache import Position, StepCache
from .traced import find_decoder, release_steps, trace_steps, traced

# Largest relative difference of a fused block's own part from stock's (2-norm). Stock
# rounds to the dtype between its layers, a fused launch does not.
TOLERANCE = {mx.float32: 1e-3, mx.float16: 1e-2, mx.bfloat16: 4e-2}
# The same for a whole step: rounding grows over the layers, a wrong step is off by 1.
STEP_TOLERANCE = 0.25
ROWS = (1, 3)


@dataclass
class Steps:
    """What :func:`install` did, and why not more."""

    decoder: str = ""
    reason: str | None = None
    blocks: Counter[str] = field(default_factory=Counter)
    unfused: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        if self.reason is not None:
            return f"not traced: {self.reason}"
        parts = [f"{n} {kind} fused" for kind, n in self.blocks.items()]
        parts += [f"{n} not fused ({why})" for why, n in self.unfused.items()]
        return f"{self.decoder}: one trace a step; " + "; ".join(parts)


def install(model: nn.Module, check: bool) -> Steps:
    """Trace the model's steps and fuse its blocks, as far as the checks here agree.

    Blocks and decoder have their own classes (:func:`remove`). check=False: the
    structure alone decides, and activations count as SiLU.
    """
    decoder = find_decoder(model)
    if decoder is None:
        return Steps(reason="no module owns layers and is called as (inputs, cache)")
    result = Steps(type(decoder).__name__)
    found: list[tuple[nn.Module, Fused]] = []
    verdicts: dict[tuple, Fused | str] = {}
    for block in decoder.layers:
        verdict = why_not(block)
        if verdict is None:
            like = _signature(block)
            if like not in verdicts:
                verdicts[like] = _judge(block, check)
            verdict = verdicts[like]
        if isinstance(verdict, Fused):
            result.blocks[type(block).__name__] += 1
            found.append((block, verdict))
        else:
            result.unfused[verdict] += 1
    try:
        for block, verdict in found:
            adopt_block(block, verdict)
        if check:
            result.reason = _compare_steps(model, decoder)
        if result.reason is None:
            trace_steps(decoder)
        else:
            remove(decoder.layers)
    except BaseException:
        # Also on KeyboardInterrupt: never leave a model half patched.
        remove([decoder, *decoder.layers])
        raise
    return result


def installed(module: nn.Module) -> bool:
    """Whether :func:`install` changed this module's class."""
    return traced(module) or fused(module)


def trace_again(modules: Iterable[nn.Module]) -> None:
    """Drop the traces of decoders: what they hold is not what layers would do now."""
    for module in modules:
        if traced(module):
            trace_steps(module)


def remove(modules: Iterable[nn.Module]) -> None:
    """Give traced decoders and fused blocks their own classes back."""
    for module in modules:
        if traced(module):
            release_steps(module)
        elif fused(module):
            release_block(module)


def _signature(block: nn.Module) -> tuple:
    attention = block["self_attn"]
    shapes = tuple((k, a.shape, a.dtype) for k, a in tree_flatten(block.parameters()))
    formats = tuple(
        (m.bits, m.group_size, m.mode)
        for _, m in block.named_modules()
        if isinstance(m, nn.QuantizedLinear)
    )
    numbers = {
        k: v for k, v in vars(attention).items() if isinstance(v, int | float | str)
    }
    eps = block["input_layernorm"].eps, block["post_attention_layernorm"].eps
    rope = same_rope(attention["rope"])
    return type(block), shapes, formats, tuple(sorted(numbers.items())), eps, rope


def _judge(block: nn.Module, check: bool) -> Fused | str:
    """How the block is fused, or why it is not."""
    if not check:
        return read(block, "silu")
    worst = []
    for activation in ACTIVATIONS:
        found = read(block, activation)
        off = max(_difference(block, found, rows) for rows in ROWS)
        if off <= 1:
            return found
        worst.append(off)
    return f"differs from stock {min(worst):.1f} times as much as its dtype allows"


def _difference(block: nn.Module, found: Fused, rows: int) -> float:
    """Fused against stock on random x, in units of what is allowed."""
    norm = block["input_layernorm"]["weight"]
    key = mx.random.key(rows)
    x = mx.random.normal((1, rows, norm.size), norm.dtype, key=key)
    shape = (1, found.kv_heads, 16, found.head_dim)
    k, v = (mx.random.normal(shape, norm.dtype, key=mx.random.key(i)) for i in (7, 8))
    mask = None if rows == 1 else "causal"

    def run(call: Callable) -> mx.array:
        position = Position(mx.array(9, mx.int32), 1, rows)
        with counted(), attention_of_step(position.lens):
            return call(x, mask, StepCache(k, v, position)).astype(mx.float32)

    ours = run(lambda *a: step(block, found, *a))
    stock = run(lambda *a: type(block).__call__(block, *a))
    allowed = TOLERANCE[norm.dtype] * mx.linalg.norm(stock - x.astype(mx.float32))
    # x itself is rounded once more when the block adds to it.
    allowed += mx.finfo(norm.dtype).eps * mx.linalg.norm(stock)
    off = (mx.linalg.norm(ours - stock) / allowed).item()
    return off if off == off else float("inf")


def _compare_steps(model: nn.Module, decoder: nn.Module) -> str | None:
    """Why a traced step of a short prompt is not what stock's layers give."""
    layers = len(decoder.layers)
    if hasattr(model, "make_cache"):
        kinds = {type(c) for c in model.make_cache()} - {KVCache}
        if kinds:
            names = ", ".join(sorted(k.__name__ for k in kinds))
            return f"the model keeps {names}, traces take KVCache"
    tokens = mx.array([[1, 2, 3, 1, 2]])
    kind = type(decoder)

    def run(at: list[KVCache], start: int, stop: int) -> mx.array:
        return decoder(tokens[:, start:stop], at)[:, -1].astype(mx.float32)

    with counted():
        caches = [KVCache() for _ in range(layers)]
        run(caches, 0, 3)
        mx.eval([c.state for c in caches])
        copies = [KVCache() for _ in range(layers)]
        for copy, cache in zip(copies, caches, strict=True):
            copy.keys, copy.values = cache.keys + 0, cache.values + 0
            copy.offset = cache.offset
        want = run(caches, 3, 5)
        trace_steps(decoder)
        try:
            have = run(copies, 3, 5)
            why = decoder._steps.reason
        finally:
            release_steps(decoder)
    if why is not None:
        return f"{kind.__name__} cannot be traced ({why})"
    off = (mx.linalg.norm(have - want) / mx.linalg.norm(want)).item()
    if not off <= STEP_TOLERANCE:
        return f"a traced step differs from stock by {off:.2f} of its size"
    return None
