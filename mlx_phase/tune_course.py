"""The races of one model in order: budget, resuming, and what is stored when."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from .bench.measure import Clock
from .tune_plans import KERNEL, Entry, Problems, StoredPlans, shape_of
from .tune_probe import VoidError
from .tune_race import Referee, Track
from .tune_table import label


@dataclass
class Course:
    """The races of one model: order, budget, and what is stored when."""

    plans: StoredPlans
    referee: Referee
    save: Callable[[], None]
    budget: float = float("inf")
    resume: bool = False
    cache_bytes: float = 0.0
    advance: Callable[[int], None] = lambda more: None
    clock: Clock = time.monotonic
    raced: list[Entry] = field(default_factory=list)
    void: list[str] = field(default_factory=list)
    skipped: int = 0
    left: int = 0

    def run(self, todo: Sequence[Problems], rows: Sequence[int]) -> None:
        """Race every launch for every M; matrices of a launch that lost also alone."""
        start, queue, seen = self.clock(), deque(todo), set(todo)
        while queue:
            problems = queue.popleft()
            track = None
            for m in rows:
                at = tuple(replace(p, M=m) for p in problems)
                alone: list[Problems] = []
                if self.resume and self.plans.get(at) is not None:
                    self.skipped += 1
                elif self.clock() - start > self.budget:
                    self.left += 1
                else:
                    track = track or Track(at, self.cache_bytes)
                    self._race(track, at, first=m == rows[0])
                if m == rows[-1] and self._lost(problems):
                    alone = [(p,) for p in problems if (p,) not in seen]
                    seen.update(alone)
                    queue.extend(dict.fromkeys(alone))
                self.advance(len(dict.fromkeys(alone)) * len(rows))

    def _race(self, track: Track, at: Problems, first: bool) -> None:
        raced = self.plans.shapes.get(shape_of(at))
        known = next(iter(raced.values())).split if raced else None
        # A new first race may split K anew, and drops what was raced with another.
        split = None if first and not self.resume else known
        for attempt in (1, 2):
            try:
                entry = self.referee.case(track, at, split)
            except VoidError as why:
                if attempt == 2:
                    self.void.append(f"void, twice: {label(at)} M = {at[0].M}: {why}")
                continue
            self.plans.add(entry)
            self.raced.append(entry)
            self.save()
            return

    def _lost(self, problems: Problems) -> bool:
        raced = self.plans.shapes.get(shape_of(problems), {})
        winners = {e.winner for e in raced.values()}
        return len(problems) > 1 and bool(winners) and KERNEL not in winners
