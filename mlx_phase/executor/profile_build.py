"""Kernels that count their instructions: LLVM's code with a counter in every block.

The optimised code (not vectorised) is close to what a GPU compiler starts from, so its
instructions, weighed by kind, stand for the GPU's. Which of them cost nothing there is
decided here; what the others cost is not.
"""

from __future__ import annotations

import ctypes
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from mlx_phase.executor import cpu_build
from mlx_phase.executor.cpu_launch import Library
from mlx_phase.executor.cpu_source import cpu_source
from mlx_phase.executor.sanitize_build import APART, shared_arrays
from mlx_phase.executor.signature import MetalSource

PROFILE_FLAGS = (
    "-O2 -DEMU_SANITIZE -DEMU_PROFILE -ffp-contract=on -emit-llvm -fno-vectorize "
    "-fno-slp-vectorize -fno-optimize-sibling-calls -Xclang -fsanitize=thread "
    "-mllvm -tsan-instrument-func-entry-exit=0 -mllvm -tsan-instrument-atomics=0 "
    "-mllvm -tsan-instrument-read-before-write=1"
).split()

_DEFINE = re.compile(
    r"^define .*@(?P<name>\"[^\"]+\"|[\w.$]+)\(.*#(?P<group>\d+)\s.*\{$"
)
_GROUP = re.compile(r"^attributes #(\d+) = \{([^}]*)\}", re.M)
_RESULT = re.compile(
    r"^\s+(?:(?P<name>%[\w.]+) = )?(?:(?:tail|musttail|notail) )?(?P<op>\w+)"
)
_NAMES = re.compile(r"%[\w.]+")
_LABEL = re.compile(r"^([\w.]+):")
_CALLEE = re.compile(r"@(?:llvm\.)?([\w]+)")
_OURS = re.compile(r"emu_|__tsan|_GLOBAL_|__cxx_global|tsan\.|_Z.*3emu|_ZZN5metal")
#: LLVM instruction -> kind; those that are not here cost nothing.
_KINDS = {
    "fadd": "float", "fsub": "float", "fmul": "float", "fdiv": "divide",
    "frem": "divide", "add": "int", "sub": "int", "and": "bitwise", "or": "bitwise",
    "xor": "bitwise", "shl": "shift", "lshr": "shift", "ashr": "shift", "mul": "imul",
    "udiv": "idivide", "sdiv": "idivide", "urem": "idivide", "srem": "idivide",
    "uitofp": "convert", "sitofp": "convert", "fptoui": "convert",
    "fptosi": "convert", "select": "compare", "switch": "branch",
}  # fmt: skip
_CALLS = {
    "fma": "fma", "fmuladd": "fma", "fmaf": "fma", "exp2": "exp", "exp": "exp",
    "log2": "exp", "log": "exp", "expf": "exp", "exp2f": "exp", "logf": "exp",
    "sqrt": "root", "sqrtf": "root", "tanhf": "trigonometry", "sinf": "trigonometry",
    "cosf": "trigonometry", "powf": "trigonometry", "erff": "trigonometry",
    "floor": "convert", "ceil": "convert", "rint": "convert", "trunc": "convert",
    "nearbyint": "convert", "umin": "compare", "umax": "compare", "smin": "compare",
    "smax": "compare", "minnum": "compare", "maxnum": "compare", "abs": "int",
    "ctpop": "shift", "fshl": "shift", "fshr": "shift", "bswap": "shift",
}  # fmt: skip
#: Kinds of instruction that a profile counts.
KINDS = (
    "fma", "float", "convert", "convert16", "bfloat", "bitwise", "shift", "int",
    "address", "imul", "idivide", "divide", "exp", "root", "trigonometry", "compare",
    "branch",
)  # fmt: skip


@dataclass(frozen=True)
class Profiled:
    """A kernel with counters, and the instructions of each block that it counts."""

    library: Library
    arena_bytes: int
    blocks: tuple[Counter[str], ...]


_LOADED: dict[str, Profiled] = {}


def load(metal: MetalSource) -> Profiled:
    """Build and load a kernel that counts; ExecutorError if it does not compile."""
    code = cpu_source(metal)
    found = _LOADED.get(code)
    if found is None:
        off = "-ffp-contract=off"
        flags = [f for f in cpu_build.KERNEL_FLAGS if f != off]
        handle = cpu_build.load(code, [*flags, *PROFILE_FLAGS], edit=count_blocks)
        ctypes.c_uint32.in_dll(handle, "emu_live").value = 1
        table = ctypes.addressof(ctypes.c_char.in_dll(handle, "emu_block_kinds"))
        rows = ctypes.string_at(table).decode().split(";")
        blocks = tuple(_parse_row(row) for row in rows)
        arrays = shared_arrays(handle)
        end = max((at + size + APART for _, at, size in arrays), default=0)
        entry = ctypes.cast(handle.emu_entry, ctypes.c_void_p).value
        counted = ctypes.c_uint64.in_dll(handle, "emu_arena_bytes").value
        library = Library(handle, entry, end)
        found = _LOADED[code] = Profiled(library, counted, blocks)
    return found


def _parse_row(row: str) -> Counter[str]:
    numbers = [int(n) for n in row.split(",")]
    return Counter({k: n for k, n in zip(KINDS, numbers, strict=True) if n})


def count_blocks(text: str) -> str:
    """LLVM code with a call of ``emu_count`` in each block, and the blocks' kinds."""
    checked = {n for n, words in _GROUP.findall(text) if "sanitize_thread" in words}
    out: list[str] = []
    rows: list[Counter[str]] = []
    lines = text.splitlines()
    at = 0
    while at < len(lines):
        start = _DEFINE.match(lines[at])
        end = at
        if start:
            while lines[end] != "}":
                end += 1
        if start and start["group"] in checked and not _OURS.match(start["name"]):
            out.append(lines[at])
            out += _counted(lines[at + 1 : end], rows)
            out.append("}")
        else:
            out += lines[at : end + 1]
        at = end + 1
    table = ";".join(",".join(str(row[k]) for k in KINDS) for row in rows) + "\0"
    cells = table.replace("\0", "\\00")
    out.append(f'@emu_block_kinds = constant [{len(table)} x i8] c"{cells}", align 1')
    return "\n".join(out) + "\n"


@dataclass
class _Line:
    name: str
    op: str
    text: str


def _counted(lines: list[str], rows: list[Counter[str]]) -> Iterator[str]:
    """The body of a function with counters; adds a row for each block."""
    parsed = [_parse(line) for line in lines]
    checks = _checks(lines)
    made = {p.name: p for p in parsed if p and p.name}
    users: dict[str, list[_Line]] = {}
    for p in parsed:
        for used in set(_NAMES.findall(p.text)) if p else ():
            if used != p.name:
                users.setdefault(used, []).append(p)
    fresh = True
    for line, p in zip(lines, parsed, strict=True):
        if p is None:  # a label, a blank line, a comment
            fresh = fresh or line.rstrip().endswith(":") or ":  " in line
            yield line
            continue
        if fresh and p.op not in ("phi", "alloca"):
            yield f"  call void @emu_count(i32 {len(rows)})"
            rows.append(Counter())
            fresh = False
        kind, cost = _kind(p, made, users)
        if p.op == "br" and checks & set(_NAMES.findall(p.text)):
            cost = 0
        if kind and cost:
            rows[-1][kind] += cost
        yield line


def _checks(lines: list[str]) -> set[str]:
    """Blocks that report a bad index: a GPU has none of them, nor branches there."""
    found, label = set(), ""
    for line in lines:
        if start := _LABEL.match(line):
            label = "%" + start[1]
        elif "@emu_checked_index(" in line:
            found.add(label)
    return found


def _parse(line: str) -> _Line | None:
    if not line.startswith("  "):
        return None
    found = _RESULT.match(line)
    if not found or line.lstrip().startswith((";", "]", "i")) and "=" not in line:
        return None
    return _Line(found["name"] or "", found["op"], line.split(", !")[0])


def _kind(
    p: _Line, made: dict[str, _Line], users: dict[str, list[_Line]]
) -> tuple[str, int]:
    """Kind of an instruction, and how many of that kind it is; ("", 0): free."""
    uses = users.get(p.name, [])
    if p.op == "br":
        return ("branch", 1) if " i1 " in p.text else ("", 0)
    if p.op in ("icmp", "fcmp"):
        # Compare and select, compare and branch are one instruction each.
        return ("", 0)
    if p.op == "call":
        name = _CALLEE.search(p.text)
        return (_CALLS.get(name[1], ""), 1) if name else ("", 0)
    if p.op == "getelementptr":
        # Loads add an offset for free; a pointer that moves on is a 64-bit addition.
        return ("address", 1) if any(u.op == "phi" for u in uses) else ("", 0)
    if p.op in ("fpext", "fptrunc"):
        if "bfloat" not in p.text:  # half operands are widened on their way
            return ("convert16", 1) if p.op == "fptrunc" else ("", 0)
        return ("bfloat", 1 if p.op == "fpext" else 3)
    kind = _KINDS.get(p.op, "")
    if kind == "idivide" and (by := _constant(p)):
        # No division is left: shifts for a power of two, a product otherwise.
        return ("shift" if by & (by - 1) == 0 else "imul"), 2
    if kind == "shift" and _moves(p, uses):
        return "", 0
    if kind == "bitwise" and _packs(p, made):
        return "", 0
    return kind, 1


def _constant(p: _Line) -> int | None:
    last = p.text.rpartition(", ")[2].strip()
    return int(last) if last.lstrip("-").isdecimal() else None


def _moves(p: _Line, uses: list[_Line]) -> bool:
    """A shift that only picks or places a half or a whole register."""
    by = _constant(p)
    whole = by is not None and by % 16 == 0 and by > 0
    return whole and bool(uses) and all(u.op in ("trunc", "or") for u in uses)


def _packs(p: _Line, made: dict[str, _Line]) -> bool:
    """Two registers put side by side; or a mask after a shift: one bit extraction."""
    operands = [made[n] for n in _NAMES.findall(p.text.partition("=")[2]) if n in made]
    if p.op == "or":
        return any(o.op == "shl" and (_constant(o) or 1) % 16 == 0 for o in operands)
    mask = _constant(p)
    return (
        p.op == "and"
        and mask is not None
        and mask & (mask + 1) == 0
        and any(o.op == "lshr" and _constant(o) is not None for o in operands)
    )
