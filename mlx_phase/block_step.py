"""What a fused decoder block computes in one step: few launches, a cache between them.

What a launch does not cover, such as mxfp4, runs through the block's layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise
from operator import is_
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from .arguments import DTYPES
from .attention_ops import sdpa
from .attention_step import attend
from .block_match import ATTENTION, Fused, rope_of
from .joint_step import JointStep
from .launch.fused import (
    planned,
    prepare_add,
    prepare_add_norm,
    prepare_glu,
    prepare_qk_norm,
    prepare_qkv,
)
from .ops import apart, variant
from .plan import supports_fused
from .problem import Matmul
from .rotary import angles
from .routes import ROUTES, Route, keep_route
from .step_cache import StepCache

ARRAYS = ("weight", "scales", "biases", "bias")


class Matrix(NamedTuple):
    """A layer's arrays, or some of its rows."""

    layer: nn.Module
    weight: mx.array
    scales: mx.array
    biases: mx.array | None
    bias: mx.array | None


class Memo(dict):
    """What is made of a block's arrays, for as long as those are the same objects."""

    def of(self, name: Any, sources: Sequence, make: Callable[[], Any]) -> Any:
        """``make()``, evaluated, or what it gave for the same sources."""
        known = self.get(name)
        if known is None or not all(map(is_, known[0], sources)):
            known = self[name] = sources, make()
            mx.eval(known[1])
        return known[1]


def _route(
    kernel: str, members: tuple[Matmul | None, ...], make: Callable, *how
) -> Route | None:
    """The route of a fused launch of ``members``; None if it does not take them.

    how: epsilon of the norm before it, the rotary embedding after it, and more that
    tells its launches apart.
    """
    if None in members:
        return None
    # Looked up first: steps that are not traced come here for every layer.
    key = (kernel, members, *how)
    if (route := ROUTES.get(key)) is None:
        if supports_fused(kernel, members):
            return None
        name = variant(members[0], planned(kernel, members, *how[:2]))
        route = keep_route(key, name, make)
    return route if route.launch is not None else None


def _kept(key: tuple, name: str, make: Callable) -> Route | None:
    route = ROUTES.get(key) or keep_route(key, name, make)
    return route if route.launch is not None else None


def _launch(route: Route, *arrays: mx.array, **how) -> Any:
    route.calls += 1
    return route.launch(*arrays, **how)


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

    def _matrices(self, owner: nn.Module, names: tuple, rows: list[int]) -> list:
        """Matrices of so many rows: of a layer each, or all of one layer, as views."""
        found = []
        for name in names:
            layer = owner[name]
            arrays = [*map(layer.get, ARRAYS)]
            parts = [arrays]
            if len(names) < len(rows):
                ends = list(pairwise([0, *accumulate(rows)]))
                parts = self.memo.of(name, arrays, partial(_sliced, arrays, ends))
            found += [Matrix(layer, *part) for part in parts]
        return found

    def _qkv(self, x: mx.array, norm: nn.Module | None, cache: Any) -> Sequence:
        """q [B, Hq, L, D], then k and v [B, Hkv, L, D] of x, normed and rotated; or
        these two in one array [2 B, Hkv, L, D]."""
        f, (B, L, K), rope = self.found, x.shape, rope_of(self.attention)
        matrices = self._matrices(self.attention, f.parts.qkv, f.rows)
        bias = all(m.bias is not None for m in matrices)
        members = tuple(_problem(m, x, bias) for m in matrices)
        rotary = f.rotary and (replace(f.rotary, dims=0) if f.normed else f.rotary)
        weight, eps = self._scaled(norm)
        route = turn = None
        if rotary is not None and (weight is None or weight.dtype == x.dtype):
            make = partial(prepare_qkv, members, rotary, eps, bias)
            route = _route("qmv_qkv", members, make, eps, rotary, bias)
        if route and f.normed and not (turn := self._qk_norm(members[0].x_dtype)):
            route = None
        if route is None:
            return self._qkv_of_layers(x if norm is None else norm(x), cache)
        cs = _angles(rope, f.rotary, cache, L)
        if each := len(cs) != L:
            # Sequences at positions of their own: so many positions of one sequence.
            x = x.reshape(1, B * L, K)
        arrays = [x, x if weight is None else weight, *_arrays(*matrices)]
        arrays += [*(m.bias for m in matrices if bias), cs]
        if B == 1 and getattr(cache, "packs", False):
            both = _launch(route, *arrays, packed=True)
            return cache.take_packed(turn(both, f.kv_heads, cs) if turn else both)
        q, kv = _launch(route, *arrays)
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
        route = _kept(key, f"qk_norm {dtype} D={f.head_dim}", make)
        return route and (lambda q, kv, cs: _launch(route, q, kv, *weights, cs))

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
        members = (_problem(matrix, rows, matrix.bias is not None),)
        route = _route("qmv_add", members, partial(prepare_add, *members))
        if route is None:
            return res + layer(rows)
        if matrix.bias is not None:
            res = res + matrix.bias
        # One row lies in memory as its heads do: a node less in the graph.
        x = x if rows.shape[:2] == (1, 1) else rows
        return _launch(route, x, *_arrays(matrix), res)

    def _joined(self, y: mx.array, res: mx.array, norm: nn.Module | None) -> mx.array:
        if norm is None:
            return res + y
        weight, eps = self._scaled(norm)
        dtype, K = DTYPES.get(y.dtype), y.shape[-1]
        if dtype and y.dtype == res.dtype == weight.dtype:
            make = partial(prepare_add_norm, dtype, K, eps)
            route = _kept(("add_norm", dtype, K, eps), f"add_norm {dtype} K={K}", make)
            if route is not None:
                return _launch(route, y, weight, res)
        y = norm(y)
        if y.dtype != mx.float16:
            return res + y
        # As some models do: their residuals grow beyond float16.
        most = mx.finfo(mx.float16).max
        wide = res.astype(mx.float32) + y.astype(mx.float32)
        return mx.clip(wide, -most, most).astype(mx.float16)

    def _glu(self, h: mx.array, norm: nn.Module | None) -> mx.array | None:
        """act(gate) * up of the normed h; None where no launch takes it."""
        f = self.found
        rows = sum(self.mlp[n]["weight"].shape[0] for n in f.parts.glu) // 2
        gate, up = self._matrices(self.mlp, f.parts.glu, [rows, rows])
        weight, eps = self._scaled(norm)
        if weight is not None and weight.dtype != h.dtype:
            return None
        members = tuple(_problem(m, h) for m in (gate, up))
        make = partial(prepare_glu, members[0], f.activation, eps)
        route = _route("qmv_glu", members, make, eps, None, f.activation)
        if route is None:
            return None
        return _launch(route, h, h if weight is None else weight, *_arrays(gate, up))


def _write(cache: Any, *new: mx.array) -> tuple:
    """Write k and v, or both in one array; gives the cache's whole keys and values."""
    if len(new) > 1:
        return cache.update_and_fetch(*new)
    if isinstance(cache, JointStep):
        return cache.write(*new)
    return cache.update_and_fetch(*mx.split(*new, 2))


def _sliced(arrays: list, ends: list[tuple[int, int]]) -> list[list]:
    return [[None if a is None else a[i:j] for a in arrays] for i, j in ends]


def _arrays(*matrices: Matrix) -> list[mx.array]:
    return [a for m in matrices for a in (m.weight, m.scales, m.biases)]


def _problem(m: Matrix, x: mx.array, biased: bool = False) -> Matmul | None:
    """What a matrix computes for x; None unless affine, of x's dtype and exact."""
    layer = m.layer
    arrays = [m.scales, m.biases, *([m.bias] if biased else [])]
    if (m.bias is not None and not biased) or any(
        a is None or a.dtype != x.dtype for a in arrays
    ):
        return None
    (N, words), M = m.weight.shape, x.size // x.shape[-1]
    K, dtype = words * 32 // layer.bits, DTYPES[x.dtype]
    p = Matmul(M, N, K, dtype, layer.bits, layer.group_size, layer.mode)
    # Fused kernels are exact ones: matrix units take the layer alone.
    return None if apart((p,), layer._exact) else p


def _angles(rope: Callable, rotary: Any, cache: Any, length: int) -> mx.array:
    if isinstance(cache, StepCache):
        return cache.position.angles(rope, rotary)
    return angles(rope, rotary, length, cache.offset)
