"""Inputs of decode attention, its oracle, and a call that must run the kernels."""

from dataclasses import dataclass, field, replace

import mlx.core as mx
import numpy as np
import ref
import ref_attention
import tolerance

from mlx_phase.launch import attention
from mlx_phase.plan_attention import SdpaPlan
from mlx_phase.problem import Sdpa

CODES = "sdpa_split_codes"
NAN = float("nan")


@dataclass
class Case:
    """One call: a problem and its arrays; k and v [B, Hkv, k_len, D] in `dtype`."""

    problem: Sdpa
    q: mx.array
    k: mx.array
    v: mx.array
    scale: float
    extras: dict = field(default_factory=dict)  # mask, sinks, lens

    def caches(self) -> list:
        """k and v as the kernel gets them: plain, or quantised by MLX."""
        p = self.problem
        forms = ((self.k, p.k_bits, p.k_group), (self.v, p.v_bits, p.v_group))
        return [
            a if bits >= 16 else mx.quantize(a, group_size=group, bits=bits)
            for a, bits, group in forms
        ]

    def run(self, plan: SdpaPlan | None = None, caches: list | None = None) -> mx.array:
        """The kernels' answer, under `plan` or the planned one."""
        launch = attention.prepare(self.problem, plan)
        k, v = caches or self.caches()
        return launch(self.q, k, v, scale=self.scale, **self.extras)

    def oracle(self) -> tuple[np.ndarray, np.ndarray]:
        """(right answer, the same with every step rounded to the dtype)."""
        p = self.problem
        forms = ((p.k_bits, p.k_group), (p.v_bits, p.v_group))
        k, v = (
            a if bits >= 16 else ref.dequantize(*a, group, bits, "affine")
            for a, (bits, group) in zip(self.caches(), forms, strict=True)
        )
        more = dict(
            mask=self.extras.get("mask"),
            sinks=self.extras.get("sinks"),
            causal=p.causal,
            window=p.window,
            lens=self.extras.get("lens"),
        )
        args = self.q, k, v, self.scale
        return (
            ref_attention.attention(*args, **more),
            ref_attention.dense(*args, dtype=p.dtype, **more),
        )

    def check(self, plan: SdpaPlan | None = None, caches: list | None = None):
        """Run and compare with the oracle; returns the kernels' answer."""
        out = self.run(plan, caches)
        p = self.problem
        assert out.dtype == self.q.dtype
        tolerance.assert_close(out, *self.oracle(), p.dtype)
        return out

    def first(self, k_len: int, q_len: int, at: int = 0) -> "Case":
        """The call of the rows at .. at + q_len over the first k_len keys."""
        return replace(
            self,
            problem=replace(self.problem, q_len=q_len),
            q=self.q[:, :, at : at + q_len],
            k=self.k[:, :, :k_len],
            v=self.v[:, :, :k_len],
        )


def small_plan(problem: Sdpa, **changes) -> SdpaPlan:
    """A plan whose chunks are short, so that small inputs have several.

    One compiled kernel serves all q_len from 2 on.
    """
    kernel = "sdpa_split" if min(problem.k_bits, problem.v_bits) >= 16 else CODES
    tile = dict(chunk=46, lanes=8, keys=1, simdgroups=8, rows=2)
    return SdpaPlan(kernel, **(tile | changes), exact=True, reason="test")


def matrix_plan(
    case: Case, rows: int = 8, chunk: int = 64, simdgroups: int = 2, keys: int = 16
) -> SdpaPlan:
    """A plan of the matrix variant, whatever the table says."""
    coded = min(case.problem.k_bits, case.problem.v_bits) < 16
    kernel = "sdpa_matrix_codes" if coded else "sdpa_matrix"
    return SdpaPlan(kernel, chunk, 4, keys, simdgroups, rows, True, "test")


def form(k_bits: int, v_bits: int, group: int) -> dict:
    """Fields of a problem: what K and V are."""
    return dict(k_bits=k_bits, v_bits=v_bits, k_group=group, v_group=group)


def longer(a: mx.array, value: float | int) -> mx.array:
    """The same keys as a view of a cache that is filled up with ``value``."""
    filled = mx.pad(a, [(0, 0), (0, 0), (0, 26), (0, 0)], constant_values=value)
    mx.eval(filled)
    return filled[:, :, : a.shape[2]]


def poisoned(cache):
    """A view in front of NaN; for codes, the scales and biases are NaN there."""
    if isinstance(cache, mx.array):
        return longer(cache, NAN)
    codes, scales, biases = cache
    return longer(codes, 7), longer(scales, NAN), longer(biases, NAN)


def normal(shape: tuple[int, ...], dtype: str, seed: int) -> mx.array:
    """Seeded normal values."""
    rng = np.random.default_rng([seed, *shape])
    values = rng.normal(size=shape).astype(np.float32)
    return mx.array(values).astype(getattr(mx, dtype))


def case(
    heads: tuple[int, int] = (4, 2),
    dims: tuple[int, int] = (64, 64),
    q_len: int = 1,
    k_len: int = 70,
    batch: int = 1,
    dtype: str = "bfloat16",
    seed: int = 0,
    scale: float | None = None,
    sinks: bool = False,
    mask=None,
    lens=None,
    **form,
) -> Case:
    """A seeded call; `mask`, `lens` as arrays, `form` more fields of the problem."""
    (Hq, Hkv), (D, DV) = heads, dims
    kind = "none"
    extras = {}
    if mask is not None:
        mx.broadcast_to(mask, (batch, Hq, q_len, k_len))  # the launcher takes its word
        kind = "bool" if mask.dtype == mx.bool_ else "additive"
        extras["mask"] = mask
    if sinks:
        extras["sinks"] = normal((Hq,), dtype, seed + 3)
    if lens is not None:
        extras["lens"] = mx.array(lens, mx.int32)
    problem = Sdpa(
        *(Hq, Hkv, D, DV, q_len, batch, dtype),
        mask=kind,
        sinks=sinks,
        lens=lens is not None,
        **form,
    )
    return Case(
        problem,
        normal((batch, Hq, q_len, D), dtype, seed),
        normal((batch, Hkv, k_len, D), dtype, seed + 1),
        normal((batch, Hkv, k_len, DV), dtype, seed + 2),
        D**-0.5 if scale is None else scale,
        extras,
    )


def random_mask(shape, kind="bool", seed=5) -> mx.array:
    rng = np.random.default_rng([seed, *shape])
    if kind == "bool":
        return mx.array(rng.random(shape) < 0.5)
    values = rng.normal(size=shape).astype(np.float32)
    values[rng.random(shape) < 0.3] = -np.inf
    return mx.array(values).astype(getattr(mx, kind))
