"""Rule 11: simd functions and barriers are reached by every thread they join.

A cheap look at names: which variables differ between the lanes of a simdgroup, or
between the simdgroups of a threadgroup, and which branches and exits depend on them.
Loads, helpers and arithmetic are known only by the names that go in, so it reports what
it can see; the CPU executor reports the rest when the kernel runs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from .msl_tokens import Function, Text, Token, match_close

LANE = 1  # differs between the lanes of a simdgroup
GROUP = 2  # differs between the threads of a threadgroup
_SOURCES = {
    "thread_index_in_simdgroup": LANE | GROUP,
    "thread_index_in_quadgroup": LANE | GROUP,
    "thread_index_in_threadgroup": LANE | GROUP,
    "thread_position_in_grid": LANE | GROUP,
    "thread_position_in_threadgroup": LANE | GROUP,
    "quadgroup_index_in_threadgroup": LANE | GROUP,
    "simdgroup_index_in_threadgroup": GROUP,
    # names that helpers give to what the kernel hands them
    "lane": LANE | GROUP,
    "lane_id": LANE | GROUP,
    "simd_lane": LANE | GROUP,
    "simd_lane_id": LANE | GROUP,
    "simd_lid": LANE | GROUP,
    "simd_gid": GROUP,
    "simd_group_id": GROUP,
}
_REDUCTIONS = re.compile(
    r"simd_(sum|product|min|max|and|or|xor|all|any|ballot|broadcast|broadcast_first)$"
)
_SIMD = re.compile(r"(simd|quad)_[a-z_]+$|simdgroup_(barrier|load|store|multiply\w*)$")
_NO_COLLECTIVE = re.compile(r"simd_(lane|lid|gid|group|is_first|vote|width|size|index)")
_CONTROL = frozenset({"if", "for", "while", "do", "switch", "_Pragma"})
_ASSIGN = frozenset("= += -= *= /= %= &= |= ^= <<= >>=".split())


def collective_kind(name: str) -> int:
    """What a function needs: LANE (the simdgroup), GROUP (the threadgroup) or 0."""
    if name == "threadgroup_barrier":
        return GROUP
    if _SIMD.match(name) and not _NO_COLLECTIVE.match(name):
        return LANE
    return 0


def collective_functions(parsed: Text) -> frozenset[str]:
    """Names of the functions of a text that reach a simd function or a barrier."""
    found: set[str] = set()
    defined = [f for f in parsed.functions if f.body < f.end]
    for _ in range(len(defined) + 1):  # to the fixed point: helpers call helpers
        before = len(found)
        for f in defined:
            names = {t.text for t in parsed.tokens[f.body : f.end] if t.kind == "name"}
            if names & found or any(collective_kind(n) for n in names):
                found.add(f.name)
        if len(found) == before:
            break
    return frozenset(found)


@dataclass
class _Walk:
    """One function: what each name differs between, and what was found."""

    tokens: list[Token]
    helpers: frozenset[str]
    taint: dict[str, int] = field(default_factory=lambda: dict(_SOURCES))
    found: dict[tuple[int, str], None] = field(default_factory=dict)

    def expression(self, start: int, end: int) -> int:
        """What the value of tokens[start:end] differs between."""
        bits = 0
        i = start
        while i < end:
            token = self.tokens[i]
            following = [t.text for t in self.tokens[i + 1 : i + 3]] + ["", ""]
            if _REDUCTIONS.match(token.text) and following[0] == "(":
                i = match_close(self.tokens, i + 1)
                bits |= GROUP
            elif token.kind == "name":
                own = self.taint.get(token.text, 0)
                member = i > 0 and self.tokens[i - 1].text in (".", "->")
                if member and token.text not in _SOURCES:
                    own = 0
                if following[0] == "." and following[1] in ("y", "z"):
                    own &= GROUP  # rows of 32 threads: y and z belong to a simdgroup
                bits |= own
            i += 1
        text = " ".join(t.text for t in self.tokens[start:end])
        if re.search(r"/ 32u?\b|> > 5u?\b|/ threads_per_simdgroup\b", text):
            bits &= ~LANE
        return bits

    def assignments(self, start: int, end: int, inside: int) -> None:
        """Note what the names assigned in tokens[start:end] now differ between."""
        depth = 0
        i = start
        while i < end:
            text = self.tokens[i].text
            depth += (text in ("(", "[", "{")) - (text in (")", "]", "}"))
            if text in _ASSIGN:
                stop, level = i + 1, 0
                while stop < end:
                    mark = self.tokens[stop].text
                    level += (mark in ("(", "[", "{")) - (mark in (")", "]", "}"))
                    if level < 0 or (mark in (",", ";") and level == 0):
                        break
                    stop += 1
                bits = self.expression(i + 1, stop) | inside
                self._mark(i - 1, bits, fresh=text == "=")
            i += 1

    def _mark(self, target: int, bits: int, fresh: bool) -> None:
        fresh = fresh and self.tokens[target].text != "]"
        while target > 0 and self.tokens[target].text == "]":  # a[i] = ...: a
            depth = 0
            while target > 0:
                depth += self.tokens[target].text == "]"
                depth -= self.tokens[target].text == "["
                target -= 1
                if depth == 0:
                    break
        if self.tokens[target].kind == "name":
            name = self.tokens[target].text
            self.taint[name] = bits | (0 if fresh else self.taint.get(name, 0))

    def calls(self, start: int, end: int, inside: int, left: int) -> None:
        """Report collectives in tokens[start:end] that some threads do not reach."""
        for i in range(start, end - 1):
            name = self.tokens[i].text
            after = self.tokens[i + 1].text
            if self.tokens[i].kind != "name" or after not in ("(", "<"):
                continue
            kind = LANE if name in self.helpers else collective_kind(name)
            if kind and inside & kind:
                how = "stands in a branch that not all threads take"
            elif kind and left & kind:
                how = "comes after an exit that only some threads take"
            else:
                continue
            self.found[self.tokens[i].line, f"{name} {how}"] = None

    def block(self, i: int, end: int, inside: int, left: int) -> tuple[int, int]:
        """Walk tokens[i:end]; gives (exits of the loop, of the function)."""
        broke = returned = 0
        while i < end:
            i, b, r = self.statement(i, end, inside, left | broke | returned)
            broke |= b
            returned |= r
        return broke, returned

    def statement(
        self, i: int, end: int, inside: int, left: int
    ) -> tuple[int, int, int]:
        """Walk one statement: (index after it, loop exits, function exits)."""
        text = self.tokens[i].text
        if text == "{":
            stop = match_close(self.tokens, i)
            return stop + 1, *self.block(i + 1, stop, inside, left)
        if text in ("if", "switch", "while", "for"):
            return self.branch(i, end, inside, left)
        if text == "do":
            after, _, returned = self.statement(i + 1, end, inside, left)
            return after, 0, returned
        following = self.tokens[i + 1].text if i + 1 < end else ""
        if text in ("else", ";", ":") or following in _CONTROL:
            return i + 1, 0, 0  # the last: a macro such as UNROLL before a loop
        if text in ("_Pragma", "["):
            return match_close(self.tokens, i + (text == "_Pragma")) + 1, 0, 0
        if text in ("case", "default"):
            while i < end and self.tokens[i].text != ":":
                i += 1
            return i + 1, 0, 0
        stop, depth = i, 0
        while stop < end and (depth > 0 or self.tokens[stop].text != ";"):
            depth += self.tokens[stop].text in ("(", "[", "{")
            depth -= self.tokens[stop].text in (")", "]", "}")
            stop += 1
        self.assignments(i, stop, inside)
        self.calls(i, stop, inside, left)
        broke = inside if text in ("break", "continue") else 0
        return stop + 1, broke, inside if text == "return" else 0

    def _join(self, before: dict[str, int]) -> None:
        """After a branch a name may still hold what it held before."""
        for name, bits in before.items():
            self.taint[name] = self.taint.get(name, 0) | bits

    def branch(self, i: int, end: int, inside: int, left: int) -> tuple[int, int, int]:
        """Walk an if, switch, while or for with what hangs on its condition."""
        text = self.tokens[i].text
        opening = i + 1
        while opening < end - 1 and self.tokens[opening].text != "(":
            opening += 1
        closing = match_close(self.tokens, opening)
        self.assignments(opening + 1, closing, inside)
        self.calls(opening, closing, inside, left)
        first, last = opening + 1, closing
        if text == "for":
            marks = [
                j for j in range(opening, closing) if self.tokens[j].text == ";"
            ] or [opening, closing]
            first, last = marks[0] + 1, marks[-1]
        depends = inside | self.expression(first, last)
        before = dict(self.taint)
        after, broke, returned = self.statement(closing + 1, end, depends, left)
        self._join(before)
        if text in ("while", "for"):
            # the next round: the body fed its names, and who left early is gone
            depends |= self.expression(first, last)
            self.statement(closing + 1, end, depends, left | broke | returned)
            self._join(before)
            return after, 0, returned
        if after < end and self.tokens[after].text == "else":
            after, b, r = self.statement(after + 1, end, depends, left)
            self._join(before)
            broke, returned = broke | b, returned | r
        return after, 0 if text == "switch" else broke, returned


def divergent_collectives(
    parsed: Text, body: bool, helpers: frozenset[str]
) -> Iterator[tuple[int, str]]:
    """(line, message) of collectives that some of their threads do not reach."""
    whole = Function("", "", 0, 0, 0, -1, len(parsed.tokens) + 1)
    functions = [whole] if body else [f for f in parsed.functions if f.body < f.end]
    for f in functions:
        walk = _Walk(parsed.tokens, helpers)
        walk.block(f.body + 1, f.end - 1, 0, 0)
        yield from walk.found
