"""A fixed product of stock MLX, timed before and after a case: clocks and heat move."""

from __future__ import annotations

import time
from collections.abc import Callable

import mlx.core as mx

from .bench.measure import Clock, per_op

# A case is void if the probe moved more than this while it was measured.
MAX_DRIFT = 0.05
# The smallest of these that keeps the GPU busy long enough to hide the launches.
SIZES, LONG_ENOUGH = (1024, 2048, 4096, 8192), 200e-6
CHAIN = (4, 28)
# A GPU that idled needs some work before its clock is what it stays at.
SETTLE = 6


class VoidError(ValueError):
    """A case whose times mean nothing; the message says why."""


class Probe:
    """Seconds of the product; the size is chosen at the first call."""

    def __init__(
        self,
        clock: Clock = time.perf_counter,
        evaluate: Callable[[object], object] = mx.eval,
    ) -> None:
        self.clock, self.evaluate = clock, evaluate
        self.size, self.arrays = 0, []

    def _grow(self, size: int) -> float:
        self.size = size
        shape = (size, size)
        w = mx.random.normal(shape).astype(mx.float16) * size**-0.5
        self.arrays = [mx.random.normal(shape).astype(mx.float16), w]
        mx.eval(self.arrays)
        return self._once()

    def _once(self) -> float:
        seconds = per_op(self._chain, CHAIN, evaluate=self.evaluate, clock=self.clock)
        if seconds <= 0:
            raise VoidError("a fixed product took no time: the machine is too noisy")
        return seconds

    def _chain(self, length: int) -> mx.array:
        x, w = self.arrays
        for _ in range(length):
            x = x @ w
        return x

    def __call__(self) -> float:
        """Seconds once two in a row agree; VoidError if they never do."""
        if not self.arrays:
            next((s for s in SIZES if self._grow(s) >= LONG_ENOUGH), None)
        last = self._once()
        for _ in range(SETTLE):
            now = self._once()
            if abs(now / last - 1) < MAX_DRIFT / 2:
                return now
            last = now
        raise VoidError(f"a fixed product never took the same time twice in {SETTLE}")
