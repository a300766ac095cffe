"""Rules that only the compiled code shows: fused sums, spilled arrays, bfloat sums.

Reads LLVM's text form of a kernel after inlining and unrolling, with no contraction
done: a product that flows into a sum there is one that a Metal compiler may fuse.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path

from .lint import Finding

_NODE = re.compile(r"^!(\d+) = (?:distinct )?!(DI\w+)\((.*)\)$", re.M)
_VALUE = re.compile(r"^\s*(%[\w.]+) = (\w+) (.*)$")
_FUNCTION = re.compile(r"^define .*?^}", re.M | re.S)
_NUMBER = re.compile(r"(0x[0-9A-Fa-f]+|0xH[0-9A-Fa-f]{4}|-?\d+\.\d+e[+-]\d+)")


def sum_findings(lowered: str, exact_rows: bool) -> list[Finding]:
    """Findings in optimised code: rule 13 (arrays left in memory) and, for
    ``exact_rows``, 14 (a product and a sum that may be fused)."""
    places = _Places(lowered)
    found = set()
    for function in _FUNCTION.findall(lowered):
        lines = [m for m in map(_VALUE.match, function.splitlines()) if m]
        products = {
            name: rest
            for name, operation, rest in (m.groups() for m in lines)
            if operation == "fmul" and not _exact_product(rest)
        }
        for match in lines:
            _, operation, rest = match.groups()
            if operation == "alloca" and rest.startswith("["):
                found.add(_spill(match, function, places))
            elif exact_rows and operation in ("fadd", "fsub"):
                for value in _used(rest, products, lines):
                    where, line = places.of(products[value])
                    message = "this product may be fused with a sum: write fma(a, b, c)"
                    found.add(Finding("14", line, message, where))
    return sorted(found, key=lambda f: (f.where, f.line, f.rule))


def bfloat_findings(lowered: str) -> list[Finding]:
    """Findings in unoptimised code: rule 8 (arithmetic on bfloat)."""
    places = _Places(lowered)
    found = set()
    for match in map(_VALUE.match, lowered.splitlines()):
        if match and match[2] in ("fadd", "fsub", "fmul", "fdiv"):
            if re.match(r"(\w+ )*(<\d+ x )?bfloat\b", match[3]):
                where, line = places.of(match[3])
                message = "bfloat arithmetic is emulated before M5: convert to float"
                found.add(Finding("8", line, message, where))
    return sorted(found, key=lambda f: (f.where, f.line))


def _used(
    rest: str, products: dict[str, str], lines: list[re.Match[str]]
) -> Iterator[str]:
    """Products among the operands, directly or as an element of a vector."""
    elements = {m[1]: m[3] for m in lines if m[2] == "extractelement"}
    for value in re.findall(r"%[\w.]+", rest):
        source = elements.get(value, value)
        yield from (v for v in re.findall(r"%[\w.]+", source) if v in products)


def _exact_product(rest: str) -> bool:
    """Whether one factor is a power of two: fusing such a product changes no bit."""
    operands = rest.split(", !dbg")[0]
    for text in _NUMBER.findall(operands):
        if text.startswith("0x") and not text.startswith("0xH"):
            value = _double(int(text, 16))
        elif text.startswith("0xH"):
            continue
        else:
            value = float(text)
        if math.isfinite(value) and abs(math.frexp(value)[0]) == 0.5:
            return True
    return False


def _double(bits: int) -> float:
    exponent = bits >> 52 & 0x7FF
    fraction = bits & ((1 << 52) - 1)
    if exponent in (0, 0x7FF):
        return math.nan
    return (1 + fraction / 2**52) * 2.0 ** (exponent - 1023)


def _spill(match: re.Match[str], function: str, places: _Places) -> Finding:
    """An array that is still memory: some index is only known when the kernel runs."""
    name = match.group(1)
    label = re.sub(r"[%.]|\d+$|\.i\b.*", "", name)
    use = re.search(
        rf"^.*(?:getelementptr|load|store).*{name}\b.*!dbg.*$", function, re.M
    )
    where, line = places.of(use.group()) if use else ("source", 1)
    message = (
        f"array '{label}' is indexed at run time and spills: unroll the loop fully"
    )
    return Finding("13", line, message, where)


class _Places:
    """Debug locations: what "!dbg !7" means as (where, line)."""

    def __init__(self, lowered: str) -> None:
        self._nodes = {m[1]: (m[2], m[3]) for m in _NODE.finditer(lowered)}

    def of(self, instruction: str) -> tuple[str, int]:
        match = re.search(r"!dbg !(\d+)", instruction)
        if not match or match[1] not in self._nodes:
            return "source", 1
        fields = self._nodes[match[1]][1]
        line = re.search(r"line: (\d+)", fields)
        return self._file(fields), int(line[1]) if line else 1

    def _file(self, fields: str) -> str:
        while True:
            file = re.search(r"\bfile: !(\d+)", fields)
            scope = re.search(r"\bscope: !(\d+)", fields)
            if file and file[1] in self._nodes:
                name = re.search(r'filename: "([^"]*)"', self._nodes[file[1]][1])
                return Path(name[1]).name if name else "source"
            if not scope or scope[1] not in self._nodes:
                return "source"
            fields = self._nodes[scope[1]][1]
