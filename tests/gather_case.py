"""Experts of an MoE layer, the launches of their products, and float64 oracles."""

from dataclasses import dataclass

import cases
import fused_case
import mlx.core as mx
import numpy as np
import ref

from mlx_phase.launch import gather
from mlx_phase.plan_gather import GatherPlan
from mlx_phase.problem import Gather, Matmul

CLIPPED = {"activation": "clipped", "alpha": 1.702, "limit": 7.0}


@dataclass
class Experts:
    """Packed weights of E experts [N, K] and, or None, a bias [E, N]."""

    parts: list[cases.Weights]
    bias: mx.array | None = None

    @property
    def args(self) -> list[mx.array]:
        """Stacked arrays in the order the launchers take them."""
        columns = zip(*(q.args for q in self.parts), strict=True)
        arrays = [mx.stack(c) for c in columns if c[0] is not None]
        return arrays if self.bias is None else [*arrays, self.bias]


def experts(
    E: int, N: int, K: int, form=("affine", 4, 64), dtype="float32", bias=False, seed=0
) -> Experts:
    parts = [cases.random_weights(N, K, *form, dtype, seed=seed + e) for e in range(E)]
    c = cases.activations(E, N, dtype, seed=seed + 77) if bias else None
    return Experts(parts, c)


def problem(x: mx.array, pairs: int, q: Experts, **more) -> Gather:
    first, name = q.parts[0], str(x.dtype).split(".")[-1]
    N, K = first.w.shape[0], x.shape[-1]
    m = Matmul(1, N, K, name, first.bits, first.group_size, first.mode)
    return Gather(m, len(q.parts), pairs, bias=q.bias is not None, **more)


def run(
    x: mx.array,
    rhs,
    *qs: Experts,
    lhs=None,
    to=None,
    p: GatherPlan | None = None,
    **more,
) -> mx.array:
    """The kernel's answer, or an error: y [*rhs.shape, 1, N]."""
    rhs = rhs if isinstance(rhs, mx.array) else mx.array(rhs, mx.uint32)
    more |= {} if lhs is None else {"each": 0}
    maps = {"lhs": lhs, "to": to}
    maps = {k: mx.array(v, mx.uint32) for k, v in maps.items() if v is not None}
    g = problem(x, rhs.size, qs[0], scattered=to is not None, **more)
    return gather.prepare(g, p)(x, rhs, *(a for q in qs for a in q.args), **maps)


def products(
    x: mx.array, rows, rhs, q: Experts, dtype: str | None = None
) -> np.ndarray:
    """float64 sums [pairs, 1, N], or those of a dense product in a dtype."""
    w = [ref.dequantize(*p.args, p.group_size, p.bits, p.mode) for p in q.parts]
    x = ref.to_numpy(x).reshape(-1, x.shape[-1])
    c = np.zeros((len(w), w[0].shape[0])) if q.bias is None else ref.to_numpy(q.bias)
    pairs = zip(rows, np.asarray(rhs).flatten(), strict=True)
    product = ref.matmul if dtype is None else lambda x, w: ref.dense(x, w, dtype)
    return np.stack([product(x[r : r + 1], w[e]) + c[e] for r, e in pairs])


def gated(gate: np.ndarray, up: np.ndarray, activation: str) -> np.ndarray:
    """act(gate) * up; ``clipped`` with the numbers of CLIPPED."""
    with np.errstate(over="ignore"):
        if activation == "clipped":
            a = np.minimum(gate, 7.0)
            return (np.clip(up, -7.0, 7.0) + 1) * fused_case.silu(1.702 * a) / 1.702
        return getattr(fused_case, activation)(gate) * up
