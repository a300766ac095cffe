"""Results of races on one device, and the plans that follow from them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace

from .launch.matmul import device_chip
from .plan import Plan, supports_launch
from .plan_exact import plan_launch
from .problem import Matmul

KERNEL, STOCK = "kernel", "stock"
MAX_ACCUMULATORS = 32  # rows * M of one lane: each lane writes one sum
WIDTHS = (1, 2, 4, 8)  # rows, simdgroups and k_simdgroups that kernels are tested with
Problems = tuple[Matmul, ...]


@dataclass(frozen=True)
class Key:
    """What a race is valid for. ``kernels`` is a hash of the text of all kernels."""

    arch: str
    gpu_cores: int
    os: str
    mlx: str
    kernels: str

    def differences(self, here: Key) -> list[str]:
        """How this key differs from the one of this device, in words."""
        pairs = ((f.name, getattr(self, f.name), getattr(here, f.name)) for f in _KEY)
        return [f"{n} {theirs!r}, here {ours!r}" for n, theirs, ours in pairs
                if theirs != ours]  # fmt: skip

    @property
    def file(self) -> str:
        """Name of the file of this GPU."""
        return f"{self.arch}-{self.gpu_cores}.json"


_KEY = fields(Key)


@dataclass(frozen=True)
class Entry:
    """Result of one race. Times are microseconds; ``noise`` is a share of the time.

    ``problems`` is one matmul, or several of one launch. ``winner`` is "kernel" or
    "stock" (also where nobody won); the plan is the fastest of the candidates.
    """

    problems: Problems
    rows: int
    simdgroups: int
    k_simdgroups: int
    splits: int
    winner: str
    us: float
    stock_us: float
    ratio: float
    noise: float
    source: str
    note: str = ""

    @property
    def M(self) -> int:  # noqa: N802
        """Rows of x."""
        return self.problems[0].M

    @property
    def split(self) -> tuple[int, int]:
        """What decides the order of additions: (k_simdgroups, splits)."""
        return self.k_simdgroups, self.splits

    def story(self) -> str:
        """The result in a few words."""
        note = f", {self.note}" if self.note else ""
        return (
            f"tuned at M = {self.M}: {self.us:.1f} us, stock {self.stock_us:.1f} us, "
            f"{self.ratio:.2f}x with noise {self.noise:.1%}{note}"
        )


def shape_of(problems: Problems) -> Problems:
    """The problems without their M: what shares one split of K."""
    return tuple(replace(p, M=0) for p in problems)


class StoredPlans:
    """The entries of one key by shape and M, and the choices that follow from them."""

    def __init__(self, key: Key, entries: Iterable[Entry] = ()):
        self.key = key
        self.shapes: dict[Problems, dict[int, Entry]] = {}
        for entry in entries:
            self.shapes.setdefault(shape_of(entry.problems), {})[entry.M] = entry

    def __iter__(self) -> Iterator[Entry]:
        for raced in self.shapes.values():
            yield from (raced[m] for m in sorted(raced))

    def get(self, problems: Problems) -> Entry | None:
        """The result for exactly these problems."""
        return self.shapes.get(shape_of(problems), {}).get(problems[0].M)

    def add(self, entry: Entry) -> None:
        """Put in a result; entries of its shape that split K otherwise go."""
        raced = self.shapes.setdefault(shape_of(entry.problems), {})
        if any(e.split != entry.split for e in raced.values()):
            raced.clear()
        raced[entry.M] = entry

    def decide(self, problems: Problems, exact: bool) -> Plan | str | None:
        """A plan, a sentence why stock serves, or None where nothing was raced.

        An M that was not raced takes the tile and the verdict of the next larger one
        that was. ``exact``: a shape goes to stock only if the kernel won for no M, so
        that rows keep their bits from one M to another.
        """
        raced = self.shapes.get(shape_of(problems))
        if not raced:
            return None
        above = [m for m in raced if m >= problems[0].M]
        entry = raced[min(above)] if above else None
        some = next(iter(raced.values()))
        shared = len(problems) > 1
        what = "one launch loses to separate ones" if shared else "stock wins"
        wins = any(e.winner == KERNEL for e in raced.values())
        base = plan_launch(problems, device_chip())
        split = {"k_simdgroups": some.k_simdgroups, "splits": some.splits}
        if entry is None:
            if exact and not wins:
                return f"{what} for every M that was raced: {some.story()}"
            # Above every raced M: the table's tile, with the split of the shape.
            groups = max(base.simdgroups, some.k_simdgroups)
            reason = f"K split as tuned at M = {some.M}; {base.reason}"
            return replace(base, simdgroups=groups, reason=reason, **split)
        if not (wins if exact else entry.winner == KERNEL):
            return f"{what}: {entry.story()}"
        tile = {"rows": entry.rows, "simdgroups": entry.simdgroups}
        return replace(base, reason=entry.story(), **tile, **split)


def illegal(e: Entry) -> str | None:
    """Why an entry's plan may not run; None if it may."""
    shared = len(e.problems) > 1
    why = supports_launch(e.problems)
    if why is not None:
        return why
    for name in ("rows", "simdgroups", "k_simdgroups"):
        if getattr(e, name) not in WIDTHS:
            return f"{name} = {getattr(e, name)} is not one of {WIDTHS}"
    if e.simdgroups % e.k_simdgroups:
        return f"{e.simdgroups} simdgroups cannot share K by {e.k_simdgroups}"
    if e.rows * e.M > MAX_ACCUMULATORS:
        return f"{e.rows} rows with M = {e.M} are over {MAX_ACCUMULATORS} accumulators"
    if shared and (e.splits != 1 or e.rows > min(p.N for p in e.problems)):
        return "a launch of several matrices takes splits = 1 and rows up to N"
    if not 1 <= e.splits <= max(1, e.problems[0].K // 64):
        return f"splits = {e.splits} for K = {e.problems[0].K}"
    if e.winner not in (KERNEL, STOCK):
        return f"winner is {e.winner!r}"
    if min(e.us, e.stock_us, e.ratio) <= 0 or e.noise < 0:
        return "times must be above 0"
    return None
