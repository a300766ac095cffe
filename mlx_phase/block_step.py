"""What a fused decoder block computes in one step: few launches, a cache between them.

What a launch does not cover, such as mxfp4, runs through the block's layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .arguments import DTYPES
from .attention_ops import sdpa
from .attention_step import attend
from .block_launch import (
    ARRAYS,
    Matrix,
    Memo,
    arrays_of,
    glu,
    kept,
    launch,
    matmul_of,
    matrices_of,
    route_of,
)
from .block_match import ATTENTION, Fused, rope_of
from .joint_step import JointStep
from .launch.fused import prepare_add, prepare_add_norm, prepare_qk_norm, prepare_qkv
from .rotary import angles
from .step_cache import StepCache


class Step:
    """A block's part of one step: B * L of 1..16 rows of x [B, L, hidden]."""

    def __init__(self, block: nn.Module, found: Fused, memo: Memo):
        self.block, self.found, self.memo = block, found, memo
        self.attention, self.mlp = block[ATTENTION], block[found.parts.mlp]

    def __call__(
        self, x: mx.array, mask: mx.array | str | None, cache: Any
    ) -> mx.array:
        """The block's output [B, L, hidden]."""
        f, L = self.found, x.shape[1]
        before, after, before_mlp, after_mlp = map(self._norm, f.parts.norms)
        q, *new = self._qkv(x, before, cache)
        k, v = _write(cache, *new)
        o = self._attend(q, k, v, mask, cache)
        if L > 1:
            o = o.transpose(0, 2, 1, 3)
        h = self._add(self.attention["o_proj"], o, x, after)
        if f.parts.glu and (g := self._glu(h, before_mlp)) is not None:
            return self._add(self.mlp["down_proj"], g, h, after_mlp)
        y = self.mlp(h if before_mlp is None else before_mlp(h))
        return self._joined(y, h, after_mlp)

    def _norm(self, name: str | None) -> nn.Module | None:
        return None if name is None else self.block[name]

    def _scaled(self, norm: nn.Module | None) -> tuple:
        """What a norm multiplies by, and its epsilon; None without a norm."""
        if norm is None:
            return None, None
        weight = norm["weight"]
        if self.found.plus_one:
            weight = self.memo.of(id(norm), [weight], lambda: 1.0 + weight)
        return weight, norm.eps

    def _qkv(self, x: mx.array, norm: nn.Module | None, cache: Any) -> Sequence:
        """q [B, Hq, L, D], then k and v [B, Hkv, L, D] of x, normed and rotated; or
        these two in one array [2 B, Hkv, L, D]."""
        f, (B, L, K), rope = self.found, x.shape, rope_of(self.attention)
        matrices = matrices_of(self.memo, self.attention, f.parts.qkv, f.rows)
        bias = all(m.bias is not None for m in matrices)
        members = tuple(matmul_of(m, x, bias) for m in matrices)
        rotary = f.rotary and (replace(f.rotary, dims=0) if f.normed else f.rotary)
        weight, eps = self._scaled(norm)
        route = turn = None
        if rotary is not None and (weight is None or weight.dtype == x.dtype):
            make = partial(prepare_qkv, members, rotary, eps, bias)
            route = route_of("qmv_qkv", members, make, eps, rotary, bias)
        if route and f.normed and not (turn := self._qk_norm(members[0].x_dtype)):
            route = None
        if route is None:
            return self._qkv_of_layers(x if norm is None else norm(x), cache)
        cs = _angles(rope, f.rotary, cache, L)
        if each := len(cs) != L:
            # Sequences at positions of their own: so many positions of one sequence.
            x = x.reshape(1, B * L, K)
        arrays = [x, *([] if weight is None else [weight]), *arrays_of(*matrices)]
        arrays += [*(m.bias for m in matrices if bias), cs]
        if B == 1 and getattr(cache, "packs", False):
            both = launch(route, *arrays, packed=True)
            return cache.take_packed(turn(both, f.kv_heads, cs) if turn else both)
        q, kv = launch(route, *arrays)
        if turn:
            q, kv = turn(q, kv, cs)
        if each:
            shape, axes = (-1, B, L, f.head_dim), (1, 0, 2, 3)
            parts = (q, *mx.split(kv, 2))
            return [a.reshape(shape).transpose(axes) for a in parts]
        return q, kv

    def _qk_norm(self, dtype: str) -> Callable | None:
        """``(q, kv, angles) -> [q, kv]`` normed and rotated; None: no such launch."""
        f, norms = self.found, [self.attention[f"{name}_norm"] for name in "qk"]
        weights = [self._scaled(m)[0] for m in norms]
        if any(DTYPES.get(w.dtype) != dtype for w in weights):
            return None
        key = ("qk_norm", dtype, f.rotary, norms[0].eps)
        make = partial(prepare_qk_norm, dtype, f.rotary, norms[0].eps)
        route = kept(key, f"qk_norm {dtype} D={f.head_dim}", make)
        return route and (lambda q, kv, cs: launch(route, q, kv, *weights, cs))

    def _qkv_of_layers(self, x: mx.array, cache: Any) -> Sequence:
        f, attention, (B, L, _) = self.found, self.attention, x.shape
        ys = [attention[name](x) for name in f.parts.qkv]
        if len(ys) == 1:
            ys = mx.split(ys[0], list(accumulate(f.rows))[:2], axis=-1)
        parts = []
        for name, y in zip("qkv", ys, strict=True):
            y = y.reshape(B, L, -1, f.head_dim)
            if f"{name}_norm" in attention:
                y = attention[f"{name}_norm"](y)
            y = y.transpose(0, 2, 1, 3)
            if name != "v":
                y = rope_of(attention)(y, offset=cache.offset)
            parts.append(y)
        return parts

    def _attend(self, q, k, v, mask: mx.array | str | None, cache: Any) -> mx.array:
        options = {"scale": self.found.scale, "mask": mask}
        options["sinks"] = self.attention.get("sinks")
        if hasattr(cache, "bits"):
            options |= {"group_size": cache.group_size, "bits": cache.bits}
        if isinstance(cache, StepCache):
            return attend(q, k, v, cache=cache, **options)
        return sdpa(q, k, v, **options)

    def _add(
        self, layer: nn.Module, x: mx.array, res: mx.array, norm: nn.Module | None
    ) -> mx.array:
        """res + layer(x), or res + norm(layer(x)); a row of x may be [heads, D]."""
        rows = x.reshape(*res.shape[:2], -1)
        if norm is not None:
            return self._joined(layer(rows), res, norm)
        matrix = Matrix(layer, *map(layer.get, ARRAYS))
        members = (matmul_of(matrix, rows, matrix.bias is not None),)
        route = route_of("qmv_add", members, partial(prepare_add, *members))
        if route is None:
            return res + layer(rows)
        if matrix.bias is not None:
            res = res + matrix.bias
        # One row lies in memory as its heads do: a node less in the graph.
        x = x if rows.shape[:2] == (1, 1) else rows
        return launch(route, x, *arrays_of(matrix), res)

    def _joined(self, y: mx.array, res: mx.array, norm: nn.Module | None) -> mx.array:
        if norm is None:
            return res + y
        weight, eps = self._scaled(norm)
        dtype, K = DTYPES.get(y.dtype), y.shape[-1]
        if dtype and y.dtype == res.dtype == weight.dtype:
            make = partial(prepare_add_norm, dtype, K, eps)
            route = kept(("add_norm", dtype, K, eps), f"add_norm {dtype} K={K}", make)
            if route is not None:
                return launch(route, y, weight, res)
        y = norm(y)
        if y.dtype != mx.float16:
            return res + y
        # As some models do: their residuals grow beyond float16.
        most = mx.finfo(mx.float16).max
        wide = res.astype(mx.float32) + y.astype(mx.float32)
        return mx.clip(wide, -most, most).astype(mx.float16)

    def _glu(self, h: mx.array, norm: nn.Module | None) -> mx.array | None:
        """act(gate) * up of the normed h; None where no launch takes it."""
        f, scaled = self.found, self._scaled(norm)
        return glu(self.memo, self.mlp, f.parts.glu, f.activation, h, *scaled)


def _write(cache: Any, *new: mx.array) -> tuple:
    """Write k and v, or both in one array; gives the cache's whole keys and values."""
    if len(new) > 1:
        return cache.update_and_fetch(*new)
    if isinstance(cache, JointStep):
        return cache.write(*new)
    return cache.update_and_fetch(*mx.split(*new, 2))


def _angles(rope: Callable, rotary: Any, cache: Any, length: int) -> mx.array:
    if isinstance(cache, StepCache):
        return cache.position.angles(rope, rotary)
    return angles(rope, rotary, length, cache.offset)
