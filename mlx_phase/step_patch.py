"""Put a model's decode steps into one trace with fused blocks, checked here first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import dataclass, field

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.cache import KVCache

from .attention_step import attention_of_step
from .block import adopt_block, fused, release_block
from .block_launch import TOLERANCE, Memo
from .block_match import ATTENTION, Fused, Parts, match, read, rope_of
from .block_step import Step
from .cache_groups import grouped
from .class_swap import train_along
from .joint_kinds import KINDS
from .joint_step import RECENT, JointStep
from .rotary import FAR, same_rope
from .routes import counted
from .step_cache import Position
from .traced import (
    ERRORS,
    find_decoder,
    find_outer,
    release_steps,
    trace_steps,
    traced,
)

# Largest relative difference of a whole step from stock's (2-norm): rounding grows
# over the layers, a wrong step is off by 1.
STEP_TOLERANCE = 0.25
# Of x for a block, and tokens of a step.
ROWS = (1, 3)
TOKENS = ((1, 2, 3, 1, 2, 3),)


@dataclass
class Steps:
    """What :func:`install` did, and why not more."""

    decoder: str = ""
    reason: str | None = None
    several: str | None = None  # why steps of several tokens are not traced
    blocks: Counter[str] = field(default_factory=Counter)
    unfused: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        traced = f"{self.decoder}: one trace a step"
        parts = [f"not traced: {self.reason}" if self.reason else traced]
        if self.several and not self.reason:
            parts.append(f"steps of several tokens not traced: {self.several}")
        parts += [f"{n} {kind} fused" for kind, n in self.blocks.items()]
        parts += [f"{n} not fused ({why})" for why, n in self.unfused.items()]
        return "; ".join(parts)


def install(model: nn.Module, check: bool) -> Steps:
    """Trace the model's steps and fuse its blocks, as far as the checks here agree.

    Blocks and decoder have their own classes (:func:`remove`). check=False: blocks are
    compared with one row, whole steps are not.
    """
    decoder = find_decoder(model)
    if decoder is None:
        return Steps(reason="no module owns layers and is called as (tokens, cache)")
    result = Steps(type(decoder).__name__)
    found: list[tuple[nn.Module, Fused]] = []
    verdicts: dict[tuple, Fused | str] = {}
    for block in decoder.layers:
        verdict = match(block)
        if isinstance(verdict, Parts):
            like = _signature(block)
            if like not in verdicts:
                verdicts[like] = _judge(block, verdict, check)
            verdict = verdicts[like]
        if isinstance(verdict, Fused):
            part = "" if verdict.parts.glu else " (attention half)"
            result.blocks[type(block).__name__ + part] += 1
            found.append((block, verdict))
        else:
            result.unfused[verdict] += 1
    caches = _caches(model, len(decoder.layers))
    result.reason = _unknown(caches)
    outer = find_outer(model, decoder)
    if result.reason or not _gives_rows(outer, deepcopy(caches)):
        outer = None
    expected = expected_outer = None
    if check and result.reason is None:
        expected_outer = outer and _stock_steps(outer, deepcopy(caches))
        expected = _stock_steps(decoder, caches)
    try:
        for block, verdict in found:
            if not fused(block):  # layers may be one and the same block
                adopt_block(block, verdict)
        if expected is not None:
            reasons, wrong = _compare(decoder, expected)
            result.reason, result.several = reasons.get(True), reasons.get(False)
            if wrong:
                # Nobody knows which block, so none is fused.
                remove(decoder.layers)
                result.blocks.clear()
        if result.reason is None:
            trace_steps(decoder)
            # Code that calls it without its head keeps a trace of its own.
            if outer and True not in _compare(outer, expected_outer or [])[0]:
                result.decoder = type(outer).__name__
                trace_steps(outer)
        # Not earlier: what is in training mode runs stock, and would prove nothing.
        for m in filter(installed, (*decoder.layers, decoder, outer or decoder)):
            train_along(m)
    except BaseException:
        # Also on KeyboardInterrupt: never leave a model half patched.
        remove([m for m in (outer, decoder, *decoder.layers) if m is not None])
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
    """Equal for blocks that compute the same of weights and x."""
    shapes = tuple((k, a.shape, a.dtype) for k, a in tree_flatten(block.parameters()))
    numbers = tuple(
        (name, k, v)
        for name, module in block.named_modules()
        for k, v in sorted(vars(module).items())
        if isinstance(v, int | float | str) and k not in ("layer_idx", "layer_id")
    )
    kinds = tuple((name, type(module)) for name, module in block.named_modules())
    return kinds, shapes, numbers, same_rope(rope_of(block[ATTENTION]))


def _judge(block: nn.Module, parts: Parts, check: bool) -> Fused | str:
    """How the block is fused, or why it is not."""
    try:
        found = read(block, parts)
        if isinstance(found, str):
            return found
        # A structure does not tell of factors: without a check there is this one.
        rows = ROWS if check else ROWS[:1]
        off = max(_difference(block, found, n) for n in rows)
    except ERRORS as e:
        return f"cannot be compared with stock ({type(e).__name__}: {e})"
    if off <= 1:
        return found
    return f"differs from stock {off:.1f} times as much as its dtype allows"


class _Same(nn.Module):
    """Stands for experts, whose choice may hang on the last bit of x."""

    def __call__(self, x: mx.array) -> mx.array:
        return x


def _difference(block: nn.Module, found: Fused, rows: int) -> float:
    """Fused against stock on random x, in units of what is allowed."""
    norm = next(block[n]["weight"] for n in found.parts.norms if n)
    key = mx.random.key(rows)
    x = mx.random.normal((1, rows, norm.size), norm.dtype, key=key)
    shape = (1, found.kv_heads, 16, found.head_dim)
    kv = [mx.random.normal(shape, norm.dtype, key=mx.random.key(i)) for i in (7, 8)]
    mask = None if rows == 1 else "causal"
    name, mlp = found.parts.mlp, block[found.parts.mlp]

    def run(call: Callable) -> mx.array:
        index = mx.arange(9, 9 + rows, dtype=mx.int32)
        # One row goes far: some models scale by the position.
        start = mx.array(FAR if rows == 1 else 9, mx.int32)
        at = Position(index, mx.array([[9 + rows], [9], [9]], mx.int32), start)
        recent = mx.zeros((2, shape[1], RECENT, shape[3]), norm.dtype)
        cache = JointStep([mx.concatenate(kv), recent], at)
        with counted(), attention_of_step([cache]):
            return call(x, mask, cache).astype(mx.float32)

    try:
        if not found.parts.glu:
            block[name] = _Same()
        ours = run(Step(block, found, Memo()))
        stock = run(lambda *a: type(block).__call__(block, *a))
    finally:
        block[name] = mlp
    allowed = TOLERANCE[norm.dtype] * mx.linalg.norm(stock - x.astype(mx.float32))
    # x itself is rounded once more when the block adds to it.
    allowed += mx.finfo(norm.dtype).eps * mx.linalg.norm(stock)
    off = (mx.linalg.norm(ours - stock) / allowed).item()
    return off if off == off else float("inf")


def _caches(model: nn.Module, layers: int) -> list:
    if hasattr(model, "make_cache"):
        return model.make_cache()
    return [KVCache() for _ in range(layers)]


def _unknown(caches: list) -> str | None:
    """Which of a model's caches no trace takes."""
    kinds = {type(c) for c in caches} - KINDS.keys()
    if not kinds:
        return None
    names = ", ".join(sorted(k.__name__ for k in kinds))
    known = ", ".join(dict.fromkeys(k.__name__ for k in KINDS))
    return f"the model keeps {names}, traces take {known}"


def _last(decoder: nn.Module, caches: list, start: int, stop: int) -> mx.array:
    with counted():
        tokens = mx.array(TOKENS)[:, start:stop]
        return decoder(tokens, caches)[:, -1].astype(mx.float32)


def _gives_rows(outer: nn.Module | None, caches: list) -> bool:
    """Whether it gives something for each token, as its decoder does."""
    if outer is None:
        return False
    try:
        with counted():
            y = outer(mx.array(TOKENS)[:, :2], caches)
    except ERRORS:
        return False
    return isinstance(y, mx.array) and y.ndim == 3 and y.shape[:2] == (1, 2)


def _stock_steps(decoder: nn.Module, caches: list) -> list[tuple]:
    """Steps of one token and, if caches take it, of three: (length, result, caches as
    they were before it)."""
    _last(decoder, caches, 0, 3)
    mx.eval([c.state for c in caches])
    steps = []
    for length in ROWS:
        if grouped(caches, length):
            mine = deepcopy(caches)
            steps.append(
                (length, _last(decoder, mine, 3, 3 + length), deepcopy(caches))
            )
    return steps


def _compare(decoder: nn.Module, steps: list[tuple]) -> tuple[dict[bool, str], bool]:
    """Why steps of one token (True) and of several are not traced; is one wrong."""
    trace_steps(decoder)
    try:
        for length, want, caches in steps:
            have = _last(decoder, caches, 3, 3 + length)
            off = (mx.linalg.norm(have - want) / mx.linalg.norm(want)).item()
            if not off <= STEP_TOLERANCE:
                why = f"a step differs from stock by {off:.2f} of its size"
                return {True: why, False: why}, True
        return dict(decoder._steps.reasons), False
    finally:
        release_steps(decoder)
