"""Races of candidate plans against stock MLX on one launch, with cold weights.

Judged by wall time in dependent chains, which is what a decode step feels: where the
host takes longer than the GPU, a kernel has to win there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import mlx.core as mx

from . import check as checks
from .bench import kernel_data
from .bench.kernel_timer import MAX_COPIES, Effort, Timer
from .bench.measure import Clock, NoiseError, Pair, copies, rotate
from .executor import ExecutorError, executor_name
from .launch.matmul import device_chip, prepare, prepare_shared
from .plan import MIN_SPLIT_K, Plan
from .plan_exact import plan_launch
from .roofline import weight_bytes
from .tune_plans import KERNEL, STOCK, WIDTHS, Entry, Problems, illegal
from .tune_probe import MAX_DRIFT, Probe, VoidError

Op = Callable[..., list[mx.array]]
# A win counts only above this many times the noise of stock against itself.
MARGIN = 2.0
# A few repeats can agree by chance: no noise is taken to be smaller.
MIN_NOISE = 0.005
SOURCE = "wall time of dependent chains"


def built_in(problems: Problems) -> Plan:
    """What the table of plan.py chooses for a launch."""
    return plan_launch(problems, device_chip())


def _legal(problems: Problems, p: Plan) -> bool:
    entry = Entry(
        problems, p.rows, p.simdgroups, p.k_simdgroups, p.splits, STOCK,
        1.0, 1.0, 1.0, 0.0, "",
    )  # fmt: skip
    return illegal(entry) is None


def splits_of(problems: Problems) -> list[Plan]:
    """The table's plan first, then other ways to split K (for all M of a shape)."""
    base, K = built_in(problems), problems[0].K
    found = [base]
    for ks in (base.k_simdgroups // 2, base.k_simdgroups * 2):
        found.append(replace(base, k_simdgroups=ks, simdgroups=max(2, ks)))
    if len(problems) == 1:
        for splits in {1, base.splits // 2, base.splits * 2} - {base.splits}:
            if splits <= max(1, K // (MIN_SPLIT_K * base.k_simdgroups)):
                found.append(replace(base, splits=splits))
    return [p for p in found if p.k_simdgroups and p.splits and _legal(problems, p)]


def tiles_of(problems: Problems, split: tuple[int, int]) -> list[Plan]:
    """Plans with this (k_simdgroups, splits): the table's tile, then its neighbours."""
    base, (ks, splits) = built_in(problems), split
    groups = max(ks, base.simdgroups)
    base = replace(base, k_simdgroups=ks, splits=splits, simdgroups=groups)
    found = [base]
    for at in (base.rows // 2, base.rows * 2):
        found.append(replace(base, rows=at))
    for at in (groups // 2, groups * 2):
        found.append(replace(base, simdgroups=at))
    return [p for p in found if p.rows in WIDTHS and _legal(problems, p)]


def kernel_op(problems: Problems, chosen: Plan) -> Op:
    """One launch as ``op(x, *weights) -> [y, ...]``, traced as layers trace it."""
    shared = len(problems) > 1
    launch = (prepare_shared if shared else prepare)(
        problems if shared else problems[0], chosen
    )
    # The CPU executor cannot be traced.
    call = launch if executor_name() == "cpu" else mx.compile(launch)
    return call if shared else lambda x, *weights: [call(x, *weights)]


def stock_op(problems: Problems) -> Op:
    """The same products by stock MLX, one call each."""
    ops = [kernel_data.stock(p) for p in problems]

    def call(x: mx.array, *weights: mx.array) -> list[mx.array]:
        each = len(weights) // len(ops)
        parts = (weights[i * each : (i + 1) * each] for i in range(len(ops)))
        return [op(x, *part) for op, part in zip(ops, parts, strict=True)]

    return call


class Track(Timer):
    """Cold weights of one shape, for every M and every pair of candidates."""

    def __init__(self, problems: Problems, cache_bytes: float) -> None:
        size = sum(weight_bytes(p) for p in problems)
        wanted = copies(size, cache_bytes)
        count = min(wanted, MAX_COPIES)
        self.cold = count == wanted
        self.buffers = [
            [a for p in problems for a in kernel_data.weights(p)] for _ in range(count)
        ]
        mx.eval(self.buffers)
        self.next: Iterator[list[mx.array]] = rotate(self.buffers)
        self.enter(problems)

    def enter(self, problems: Problems) -> None:
        """Take another M of the same shape."""
        self.problems, self.problem = problems, problems[0]
        shape = (self.problem.M, self.problem.K)
        x = mx.random.normal(shape).astype(getattr(mx, self.problem.x_dtype))
        self.x = x
        mx.eval(x)

    def chain(self, side: str, length: int) -> list[mx.array]:
        """``length`` launches, each on a result of the one before, not evaluated."""
        x, ys, others = self.x, [], []
        for _ in range(length):
            ys = self.ops[side](x, *next(self.next))
            others += ys[1:]
            x = kernel_data.link(ys[0], self.problem)
        return [ys[0], *others]

    def race(self, a: Op, b: Op, effort: Effort, clock: Clock) -> Pair:
        """Seconds per launch of two operations, in ABBA order."""
        self.ops = {"A": a, "B": b}
        return self.wall(effort, clock)

    def error(self, op: Op) -> float:
        """Worst error of an operation, as `kernel_data.error_of` counts it."""
        weights, worst = self.buffers[0], 0.0
        each = len(weights) // len(self.problems)
        for i, p in enumerate(self.problems):
            mine = tuple(weights[i * each : (i + 1) * each])

            def one(x: mx.array, *_: mx.array, i: int = i) -> mx.array:
                return op(x, *weights)[i]

            worst = max(worst, kernel_data.error_of(one, self.x, mine, p))
        return worst


def noise_of(pair: Pair) -> float:
    """Noise of a race of one operation with itself, as a share of its time."""
    return max(MIN_NOISE, abs(pair.ratio - 1), (pair.a.spread + pair.b.spread) / 2)


@dataclass
class Referee:
    """How cases are measured; everything that depends on the device is injected."""

    effort: Effort
    clock: Clock = time.perf_counter
    kernel: Callable[[Problems, Plan], Op] = kernel_op
    stock: Callable[[Problems], Op] = stock_op
    passes: Callable[[Problems, Plan], str | None] = lambda problems, p: (
        checks.check(*problems, chosen=p).error
    )
    probe: Callable[[], float] | None = None

    def __post_init__(self) -> None:
        if self.probe is None:
            self.probe = Probe(self.clock)

    def case(
        self, track: Track, problems: Problems, split: tuple[int, int] | None
    ) -> Entry:
        """Race the candidates of one launch; ``split`` None: choose that too.

        VoidError where the machine changed meanwhile or was too noisy.
        """
        track.enter(problems)
        before = self.probe()
        try:
            entry = self._case(track, problems, split)
        except NoiseError as error:
            raise VoidError(str(error)) from error
        moved = abs(self.probe() / before - 1)
        if moved > MAX_DRIFT:
            raise VoidError(
                f"a fixed product took {moved:.0%} more or less time after the case "
                "than before it: clock or temperature changed"
            )
        return entry

    def _case(
        self, track: Track, problems: Problems, split: tuple[int, int] | None
    ) -> Entry:
        stock = self.stock(problems)
        own = self._race(track, stock, stock)
        noise = noise_of(own)
        seen: dict[Plan, Pair] = {}
        failed: list[str] = []
        if split is None:
            found = self._try(track, stock, splits_of(problems), noise, seen, failed)
            split = found.k_simdgroups, found.splits
        tiles = tiles_of(problems, split)
        best = self._try(track, stock, tiles, noise, seen, failed)
        note, pair = "" if track.cold else "weights stay in the cache", own
        won = best in seen
        if won:
            # Once more: the best of several was partly the luckiest.
            pair = self._race(track, self.kernel(problems, best), stock)
            won = pair.ratio - 1 > MARGIN * noise
        else:
            note = f"no candidate runs: {'; '.join(failed)}"
        return Entry(
            problems,
            best.rows,
            best.simdgroups,
            best.k_simdgroups,
            best.splits,
            KERNEL if won else STOCK,
            us=pair.a.median * 1e6,
            stock_us=pair.b.median * 1e6,
            ratio=pair.ratio,
            noise=noise,
            source=SOURCE,
            note=note,
        )

    def _race(self, track: Track, a: Op, b: Op) -> Pair:
        return track.race(a, b, self.effort, self.clock)

    def _try(
        self,
        track: Track,
        stock: Op,
        candidates: list[Plan],
        noise: float,
        seen: dict[Plan, Pair],
        failed: list[str],
    ) -> Plan:
        """The candidate that beats stock by most; the first unless it is beaten."""
        for p in candidates:
            if p in seen:
                continue
            try:
                error = self.passes(track.problems, p) or self._wrong(track, p)
            except (ExecutorError, RuntimeError) as e:
                # MLX reports compile and launch errors of a kernel as these two.
                error = str(e)
            if error is not None:
                failed.append(f"rows={p.rows} simdgroups={p.simdgroups}: {error}")
                continue
            op = self.kernel(track.problems, p)
            seen[p] = self._race(track, op, stock)
        first, able = candidates[0], [p for p in candidates if p in seen]
        best = max(able, key=lambda p: seen[p].ratio, default=first)
        if first in seen and seen[best].ratio <= seen[first].ratio * (1 + noise):
            return first  # the table's, where the difference may be noise
        return best

    def _wrong(self, track: Track, p: Plan) -> str | None:
        error = track.error(self.kernel(track.problems, p))
        allowed = kernel_data.TOLERANCE[track.problem.x_dtype]
        return None if error <= allowed else f"wrong result: error {error:.3g}"
