"""The file of raced plans, and what `patch` reads from it.

A file holds for one key only (chip, OS, mlx, kernels) and is believed whole or not at
all. Looking it up never raises for what is in the folder: a bad file is a note.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
from platformdirs import user_data_path

from . import ops, source
from .launch.matmul import device_chip
from .layers import forget_routes
from .machine import apple_gpu_cores, os_name
from .problem import Matmul
from .tune_plans import KERNEL, Entry, Key, StoredPlans, illegal

SCHEMA = 1
FOLDER = "MLX_PHASE_PLANS"
NONE_STORED = "no plan stored: the built-in table chooses"


class PlanFileError(ValueError):
    """A plan file that cannot be used; the message says why."""


@cache
def kernels_hash() -> str:
    """Short hash of the text of every kernel, as MLX compiles it."""
    texts = [source.load(name) for name in sorted(source.KERNELS)]
    text = repr(texts + [source.load(name, lean=True) for name in source.LEAN])
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
    entries = []
    for number, values in enumerate(rows):
        entry = _entry(values, f"entry {number}")
        entries.append(entry)
    plans = StoredPlans(key, entries)
    for shape, raced in plans.shapes.items():
        if len({e.split for e in raced.values()}) > 1:
            raise PlanFileError(f"{shape} splits K in two ways: rows are not exact")
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


def to_json(plans: StoredPlans) -> str:
    """The text of a plan file."""
    entries = [asdict(e) for e in plans]
    data = {"schema": SCHEMA, "key": asdict(plans.key), "entries": entries}
    return json.dumps(data, indent=1, allow_nan=False) + "\n"


def read(path: Path) -> StoredPlans:
    """The plans of a file; PlanFileError names the file and what is wrong."""
    try:
        return parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PlanFileError(f"{path}: {error}") from error


def save(plans: StoredPlans, path: Path) -> None:
    """Write the file in one step: whoever reads sees the old one or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = to_json(plans)
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
    winners = [e.winner for e in plans]
    won = winners.count(KERNEL)
    lost = len(winners) - won
    return Lookup(plans, f"stored plan {here.file}: {won} races won, {lost} to stock")


def activate(tune: str) -> Lookup:
    """Let the stored plans choose for this process, or only the table (tune="off")."""
    found = Lookup(None, "off") if tune == "off" else lookup()
    decide, token = None, None
    if found.plans is not None:
        decide, token = found.plans.decide, to_json(found.plans)
    if ops.use_plans(decide, token):
        forget_routes()
    return found


def notes(found: Lookup, exact: bool) -> list[str]:
    """What a reader of the report must know about the stored plans."""
    lines = [found.note] if found.note else []
    kept = []
    for raced in found.plans.shapes.values() if found.plans else ():
        winners = {e.winner for e in raced.values()}
        if KERNEL not in winners:
            first = raced[min(raced)]
            what = " + ".join(f"{p.K}x{p.N}" for p in first.problems)
            apart = "apart" if len(first.problems) > 1 else "on stock"
            lines.append(f"{what} goes {apart}: {first.story()}")
        elif exact:
            kept += [e for e in raced.values() if e.winner != KERNEL]
    if kept:
        lines.append(
            f"{len(kept)} raced cases that stock won stay on kernels so that rows "
            "keep their bits for every M; exact=False gives them to stock"
        )
    return lines
