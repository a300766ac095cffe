"""One compiled decode step and what it calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import mlx.core as mx

from . import routes
from .ops import Route


class Trace:
    """A compiled step and the routes that it calls, each with how often."""

    __slots__ = ("call", "routes", "kernels", "generation", "whole")

    def __init__(self) -> None:
        self.call: Callable[..., list[mx.array]]
        self.routes: list[tuple[Route, int]] = []
        self.kernels: list[Route] = []
        self.generation = routes.generation()
        # (group, index there) of joint caches that had to be made whole.
        self.whole: list[tuple[int, int]] = []

    def note(self, called: list[Route]) -> None:
        """Keep what one run of the model's code called."""
        self.routes = list(Counter(called).items())
        # Others are stock for good, by their reason.
        self.kernels = [route for route, _ in self.routes if route.launch is not None]

    def stale(self) -> bool:
        """Whether a kernel in it was switched off since, or all plans have changed."""
        if self.generation != routes.generation():
            return True
        return any(route.launch is None for route in self.kernels)

    def count(self) -> None:
        """Count the calls of one replay."""
        for route, calls in self.routes:
            route.calls += calls
