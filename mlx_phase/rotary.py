"""What a rotary embedding does, found by calling it: no formula is derived twice."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import numpy as np

from .launch.fused import Rotary

Rope = Callable[..., mx.array]
# Far enough for the slowest pair to turn visibly in float32, near enough to be exact.
FAR = 50_000


def no_rope(x: mx.array, offset: mx.array | int = 0) -> mx.array:
    """What layers without a rotary embedding do."""
    return x


def rotary_of(rope: Rope, head_dim: int) -> Rotary | None:
    """The pairs that ``rope(x, offset=...)`` rotates; None if it does other things."""
    x = np.zeros((1, 1, 1, head_dim), np.float32)
    x[..., 0] = 1
    turned = np.array(rope(mx.array(x), offset=1))[0, 0, 0]
    pair = np.flatnonzero(np.abs(turned) > 1e-6)
    if (turned == x[0, 0, 0]).all() and head_dim % 4 == 0:
        x = np.ones((1, 1, 1, head_dim), np.float32)
        same = (np.array(rope(mx.array(x), offset=FAR)) == x).all()
        return Rotary(head_dim, 0, False) if same else None
    if len(pair) != 2 or pair[0] != 0:
        return None
    traditional = bool(pair[1] == 1)
    dims = int(2 * pair[1])
    if traditional:
        x = np.ones((1, 1, 1, head_dim), np.float32)
        changed = np.array(rope(mx.array(x), offset=FAR))[0, 0, 0] != 1
        dims = int(np.flatnonzero(changed).max()) + 1
    if dims > head_dim or dims % 4 or head_dim % 4:
        return None
    return Rotary(head_dim, dims, traditional)


def angles(rope: Rope, rotary: Rotary, length: int, start: mx.array | int) -> mx.array:
    """cos and sin of ``length`` positions from ``start``: fp32 [length, head_dim].

    start [B]: of B sequences, one after the other, fp32 [B * length, head_dim]. The cos
    of a pair stands in the place of its first dim, the sin in that of its second: what
    ``rope`` makes of (1, 0). Any scale of rope's own is in them.
    """
    batch = start.size if isinstance(start, mx.array) else 1
    probe = np.zeros((batch, 1, length, rotary.head_dim), np.float32)
    first = slice(0, rotary.dims, 2) if rotary.traditional else slice(rotary.dims // 2)
    probe[..., first] = 1
    return rope(mx.array(probe), offset=start).reshape(-1, rotary.head_dim)


def same_rope(rope: Rope) -> tuple:
    """Equal for ropes that rotate alike: their type and every number they hold."""
    # A module's attributes are its items or plain attributes.
    held = {**vars(rope), **(rope if isinstance(rope, dict) else {})}
    held.pop("_no_grad", None)
    return type(rope), *(
        (name, np.array(a).tobytes() if isinstance(a, mx.array) else repr(a))
        for name, a in sorted(held.items())
    )
