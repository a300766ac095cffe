"""Plans of narrow matrices on chips of many cores: whether K is better split."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..chip import Chip, lookup
from ..counters import LANES, clock_ghz
from ..plan import Plan, tile
from ..problem import Matmul
from .counters_kernels import ours, planned, time

#: Cycles from an FMA to one that needs its sum (philipturner/metal-benchmarks: 11.3 a
#: FMA with one simdgroup on a scheduler, 2.75 with four chains in it).
LATENCY = 11.3
#: Bytes that a lane asks for of each row of W before it waits: a pack of 32 codes.
PACK = 16
SCHEDULERS = 4
#: (K, N) and chip.
CASES = (
    ((4096, 4096), "M3 Ultra 80"),
    ((4096, 2048), "M3 Ultra 80"),
    ((4096, 1024), "M3 Ultra 80"),
    ((4096, 1024), "M4 Max 40"),
)
SPLITS, ROWS = (1, 2, 4), (1, 4, 8)


@dataclass(frozen=True)
class Fill:
    """A launch of N rows of W: of ``plan``, at M rows of x."""

    M: int
    K: int
    N: int
    plan: Plan
    chip: Chip

    @property
    def threadgroups(self) -> int:
        """Of the launch."""
        p = self.plan
        return -(-self.N // (p.rows * (p.simdgroups // p.k_simdgroups)))

    @property
    def most(self) -> int:
        """Threadgroups of the core that has most of them."""
        return -(-self.threadgroups // self.chip.gpu_cores)

    @property
    def in_flight(self) -> float:
        """Bytes of W that a core has asked for, on average, while its lanes wait."""
        rows = self.N * self.plan.k_simdgroups / self.chip.gpu_cores
        return rows * LANES * PACK

    @property
    def us(self) -> float:
        """Of memory, or of the fullest core: whichever takes longer.

        A core's simdgroups issue one instruction a cycle on each scheduler, or fewer if
        their chains of FMAs, one for each row of W and of x, are too few to hide
        ``LATENCY``.
        """
        p, per_weight = self.plan, ours(self.M, self.plan, 4, self.K)
        chains = self.most * p.simdgroups / SCHEDULERS * p.rows * self.M
        weights = self.N * self.K * self.most / self.threadgroups
        cycles = per_weight.cost.slots * weights / SCHEDULERS
        core = cycles * max(1, LATENCY / chains) / clock_ghz(self.chip) / 1000
        whole = time([per_weight], self.M, self.K, self.N, self.chip)
        return max(core, whole.parts["memory"])


def fills(K: int, N: int, chip: Chip, ks: int) -> list[Fill]:
    """At each M, with the tile that the plan takes if ``ks`` simdgroups split K."""
    found = []
    for M in ROWS:
        rows, simdgroups = tile(Matmul(M, N, K), ks, chip, True)
        p = planned(M, chip, K, N)
        p = replace(p, rows=rows, simdgroups=simdgroups, k_simdgroups=ks)
        found.append(Fill(M, K, N, p, chip))
    return found


def fill() -> str:
    """Predicted times with K whole and split, and what they follow from."""
    head = " | ".join(f"M = {M}" for M in ROWS)
    lines = [
        f"| K → N | chip | K over | simdgroups a core | in flight a core | {head} |",
        "| --- | --- | ---: | ---: | ---: |" + " ---: |" * len(ROWS),
    ]
    for (K, N), name in CASES:
        chip = lookup(name)
        chosen = planned(1, chip, K, N).k_simdgroups
        for ks in SPLITS:
            found = fills(K, N, chip, ks)
            cells = " | ".join(
                f"{f.us:.1f} ({f.threadgroups / chip.gpu_cores:.1f} of {f.most})"
                for f in found
            )
            each = N * ks / found[0].plan.rows / chip.gpu_cores
            mark = ", planned" if ks == chosen else ""
            lines.append(
                f"| {K} → {N} | {name} | {ks}{mark} | {each:.1f} | "
                f"{found[0].in_flight / 1024:.0f} KiB | {cells} |"
            )
    return "\n".join(lines)
