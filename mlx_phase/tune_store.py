"""Plans that `tune` raced on a device: a JSON file, and what `patch` reads from it.

A file holds for one key only (chip, OS, mlx, kernels) and is believed whole or not at
all. Reading never raises for what is in the folder: a bad file is a note.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
from platformdirs import user_data_path

from . import source
from .launch.matmul import device_chip
from .machine import apple_gpu_cores, os_name
from .plan import MAX_M, Plan, plan, plan_shared, supports, supports_shared
from .problem import Matmul

SCHEMA = 1
FOLDER = "MLX_PHASE_PLANS"
NONE_STORED = "no plan stored: the built-in table chooses"
KERNEL, STOCK = "kernel", "stock"
MAX_ACCUMULATORS = 24  # rows * M of one lane; more spill (see plan.py)
MAX_SIMDGROUPS = 8
Problems = tuple[Matmul, ...]


class PlanFileError(ValueError):
    """A plan file that cannot be used; the message says why."""


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
        return re.sub(r"[^\w.-]", "-", f"{self.arch}-{self.gpu_cores}") + ".json"


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

    def story(self) -> str:
        """The result in a few words."""
        return (
            f"tuned at M = {self.M}: {self.us:.1f} us, stock {self.stock_us:.1f} us, "
            f"{self.ratio:.2f}x with noise {self.noise:.1%}"
        )


@cache
def kernels_hash() -> str:
    """Short hash of the text of every kernel, as MLX compiles it."""
    text = repr([source.load(name) for name in sorted(source.KERNELS)])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def device_key() -> Key:
    """The key of this process's device."""
    chip = device_chip()
    cores = (chip.arch.startswith("applegpu") and apple_gpu_cores()) or chip.gpu_cores
    return Key(chip.arch, cores, os_name(), mx.__version__, kernels_hash())


def folder() -> Path:
    """Where plans are: ``MLX_PHASE_PLANS``, else the user's data folder."""
    given = os.environ.get(FOLDER)
    if given:
        return Path(given).expanduser()
    return user_data_path("mlx_phase", appauthor=False) / "plans"


def shape_of(problems: Problems) -> Problems:
    """The problems without their M: what shares one split of K."""
    return tuple(replace(p, M=0) for p in problems)


class StoredPlans:
    """The entries of one file, and the choices that follow from them."""

    def __init__(self, key: Key, entries: Iterable[Entry] = ()):
        self.key = key
        self.entries = {e.problems: e for e in entries}

    def by_shape(self) -> dict[Problems, dict[int, Entry]]:
        """Entries by problems without M, then by M in ascending order."""
        found: dict[Problems, dict[int, Entry]] = {}
        for e in sorted(self.entries.values(), key=lambda e: e.M):
            found.setdefault(shape_of(e.problems), {})[e.M] = e
        return found

    def add(self, entry: Entry) -> None:
        """Put in a result; entries of its shape that split K otherwise go."""
        split = entry.k_simdgroups, entry.splits
        shape = shape_of(entry.problems)
        self.entries = {
            problems: e
            for problems, e in self.entries.items()
            if shape_of(problems) != shape or (e.k_simdgroups, e.splits) == split
        }
        self.entries[entry.problems] = entry

    def decide(self, problems: Problems, exact: bool) -> Plan | str | None:
        """A plan, a sentence why stock serves, or None where nothing was raced.

        An M that was not raced takes the tile and the verdict of the next larger one
        that was. ``exact``: a shape goes to stock only if the kernel won for no M, so
        that rows keep their bits from one M to another.
        """
        raced = self._by_shape.get(shape_of(problems))
        if raced is None:
            return None
        entry = next((e for m, e in raced.items() if m >= problems[0].M), None)
        some = next(iter(raced.values()))
        shared = len(problems) > 1
        base = (plan_shared if shared else plan)(
            problems if shared else problems[0], device_chip()
        )
        split = {"k_simdgroups": some.k_simdgroups, "splits": some.splits}
        if entry is None:
            # Above every raced M: the table's tile, with the split of the shape.
            groups = max(base.simdgroups, some.k_simdgroups)
            reason = f"K split as tuned at M = {some.M}; {base.reason}"
            return replace(base, simdgroups=groups, reason=reason, **split)
        won = entry.winner == KERNEL
        if exact and not won:
            won = any(e.winner == KERNEL for e in raced.values())
        if not won:
            what = "one launch loses to separate ones" if shared else "stock wins"
            return f"{what}: {entry.story()}"
        tile = {"rows": entry.rows, "simdgroups": entry.simdgroups}
        return replace(base, reason=entry.story(), **tile, **split)

    @property
    def _by_shape(self) -> dict[Problems, dict[int, Entry]]:
        if getattr(self, "_index_of", None) is not self.entries:
            self._index, self._index_of = self.by_shape(), self.entries
        return self._index

    def to_json(self) -> str:
        """The text of the file."""
        entries = [asdict(e) for e in self.entries.values()]
        data = {"schema": SCHEMA, "key": asdict(self.key), "entries": entries}
        return json.dumps(data, indent=1, allow_nan=False) + "\n"


def parse(text: str) -> StoredPlans:
    """Plans from the text of a file; PlanFileError says what is wrong with it."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PlanFileError(f"not JSON, or cut off ({error})") from error
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        has = data.get("schema") if isinstance(data, dict) else None
        raise PlanFileError(f"schema {has!r} is not {SCHEMA}")
    key = _fill(Key, data.get("key"), "key")
    rows = data.get("entries")
    if not isinstance(rows, list):
        raise PlanFileError("has no list of entries")
    plans = StoredPlans(key)
    for number, values in enumerate(rows):
        entry = _entry(values, f"entry {number}")
        plans.entries[entry.problems] = entry
    for raced in plans.by_shape().values():
        if len({(e.k_simdgroups, e.splits) for e in raced.values()}) > 1:
            what = next(iter(raced.values())).problems
            raise PlanFileError(f"{what} splits K in two ways: rows are not exact")
    return plans


_TYPES = {"int": int, "str": str, "float": (int, float)}


def _fill(kind: type, values: Any, where: str) -> Any:
    """A dataclass from JSON, with every field there and of its type."""
    if not isinstance(values, Mapping):
        raise PlanFileError(f"{where} is no object")
    given = {}
    for f in fields(kind):
        if f.name not in values:
            raise PlanFileError(f"{where} has no {f.name!r}")
        value = values[f.name]
        wanted = _TYPES.get(f.type)
        if wanted and (not isinstance(value, wanted) or isinstance(value, bool)):
            raise PlanFileError(f"{where}: {f.name} is {value!r}, not {f.type}")
        if isinstance(value, float) and not math.isfinite(value):
            raise PlanFileError(f"{where}: {f.name} is {value}")
        given[f.name] = value
    return kind(**given)


def _entry(values: Any, where: str) -> Entry:
    entry = _fill(Entry, values, where)
    if not isinstance(entry.problems, list) or not entry.problems:
        raise PlanFileError(f"{where}: problems must be a list")
    problems = tuple(_fill(Matmul, p, f"{where}: a problem") for p in entry.problems)
    entry = replace(entry, problems=problems)
    if (why := illegal(entry)) is not None:
        raise PlanFileError(f"{where}: {why}")
    return entry


def illegal(e: Entry) -> str | None:
    """Why an entry's plan may not run; None if it may."""
    shared = len(e.problems) > 1
    why = supports_shared(e.problems) if shared else supports(e.problems[0])
    if why is not None:
        return why
    widths = (1, 2, 4, MAX_SIMDGROUPS)
    for name in ("rows", "simdgroups", "k_simdgroups"):
        if getattr(e, name) not in widths:
            return f"{name} = {getattr(e, name)} is not one of {widths}"
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


def read(path: Path) -> StoredPlans:
    """The plans of a file; PlanFileError names the file and what is wrong."""
    try:
        return parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PlanFileError(f"{path}: {error}") from error


def save(plans: StoredPlans, path: Path) -> None:
    """Write the file in one step: whoever reads sees the old one or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = plans.to_json()
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        # Also on KeyboardInterrupt: no litter beside the plans.
        Path(name).unlink(missing_ok=True)
        raise


@dataclass(frozen=True)
class Lookup:
    """What is stored for this device: plans or None, a status line, maybe a note."""

    plans: StoredPlans | None
    status: str
    note: str | None = None


def lookup() -> Lookup:
    """The plans of this device, if a file has them and they hold here."""
    where = folder()
    try:
        names = sorted(p.name for p in where.glob("*.json"))
    except OSError as error:
        return Lookup(None, NONE_STORED, f"{where} cannot be read: {error}")
    if not names:
        return Lookup(None, NONE_STORED)
    here = device_key()
    table = "the built-in table chooses"
    if here.file not in names:
        return Lookup(None, f"no plan stored for {here.file[:-5]}: {table}")
    try:
        plans = read(where / here.file)
    except PlanFileError as error:
        note = f"stored plan not used: {error}; delete it, or run tune again"
        return Lookup(None, f"stored plan cannot be read: {table}", note)
    if different := plans.key.differences(here):
        return Lookup(None, f"stored plan not used ({'; '.join(different)}): {table}")
    won = sum(e.winner == KERNEL for e in plans.entries.values())
    lost = len(plans.entries) - won
    return Lookup(plans, f"stored plan {here.file}: {won} races won, {lost} to stock")
