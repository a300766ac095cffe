"""Rewrites of Metal text that macros cannot do, shared by the executors.

Every function keeps the number of lines, so that compilers name the user's own lines.
"""

from __future__ import annotations

import re
from collections.abc import Callable

#: Called with (element type, name, dimensions, alignment); dimensions keep their
#: brackets (``"[4][N]"``, or ``""`` for a scalar), alignment is ``""`` or a number.
Emit = Callable[[str, str, str, str], str]

_COMMENT = re.compile(
    r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'', re.DOTALL
)
_THREADGROUP = re.compile(r"\b(?:static\s+)?threadgroup\b(?!_)")
_ALIGN = re.compile(r"\s*alignas\s*\(([^()]*)\)")
_DIMENSION = re.compile(r"\s*(\[[^\[\]]*(?:\[[^\[\]]*\][^\[\]]*)*\])")
_NAME = re.compile(r"\s*([A-Za-z_]\w*)")
_METAL_INCLUDE = re.compile(
    r"^[ \t]*#[ \t]*(?:include|import)[ \t]*<(?:metal|simd)[^>\n]*>[^\n]*", re.MULTILINE
)
_SWIZZLE = re.compile(r"(?:\.|->)\s*([xyzw]{2,4}|[rgba]{2,4})\b")


def strip_comments(text: str) -> str:
    """Remove // and /* */ comments; strings and line breaks stay."""

    def replace(match: re.Match[str]) -> str:
        found = match.group()
        if found[0] != "/":
            return found
        return "\n" * found.count("\n") or " "

    return _COMMENT.sub(replace, text)


def remove_metal_includes(text: str) -> str:
    """Blank the lines that include Metal's own headers (``<metal_stdlib>`` ...)."""
    return _METAL_INCLUDE.sub("", text)


def remove_attributes(text: str) -> str:
    """Remove ``[[...]]`` attributes, nested brackets included.

    ``a[b[i]]`` is an index, not an attribute: only an opening ``[[`` counts.
    """
    out = []
    start = 0
    while (begin := text.find("[[", start)) >= 0:
        depth = 0
        end = begin
        for end in range(begin, len(text)):
            depth += {"[": 1, "]": -1}.get(text[end], 0)
            if depth == 0:
                break
        inside = text[begin : end + 1]
        out.append(text[start:begin] + "\n" * inside.count("\n"))
        start = end + 1
    return "".join(out) + text[start:]


def rewrite_threadgroup(text: str, emit: Emit) -> str:
    """Replace statement-level threadgroup variables by what ``emit`` gives.

    ``threadgroup float a[N][M], b[K];`` calls ``emit`` for a and for b. Pointers,
    references and parameters stay as they are. ``text`` must be free of comments.
    """
    out = []
    start = 0
    for match in _THREADGROUP.finditer(text):
        if match.start() < start:
            continue
        found = _declaration(text, match.end())
        if found is None or not _starts_statement(text, match.start()):
            continue
        end, elem, align, variables = found
        new = " ".join(emit(elem, name, dims, align) for name, dims in variables)
        lines = text.count("\n", match.start(), end) - new.count("\n")
        out.append(text[start : match.start()] + new + "\n" * lines)
        start = end
    return "".join(out) + text[start:]


def swizzle_macros(text: str) -> str:
    """Define the swizzle lists of msl_vec.h for the swizzles that ``text`` names.

    Put it before msl_vec.h: a vec4 has 336 swizzles, and declaring all of them costs
    0.1 s of compile time per element type.
    """
    names = sorted(set(_SWIZZLE.findall(text)))
    lines = []
    for size in (2, 3, 4):
        entries = []
        for name in names:
            digits = ["xyzwrgba".index(letter) % 4 for letter in name]
            if max(digits) < size:
                code = sum(digit << 2 * i for i, digit in enumerate(digits))
                entries.append(f" MSL_SWIZZLE({name}, {len(name)}, {code})")
        lines.append(f"#define MSL_SWIZZLES_{size}{''.join(entries)}\n")
    return "".join(lines)


def _starts_statement(text: str, position: int) -> bool:
    """Whether a statement may begin here: parameters follow ``(``, ``,`` or ``<``."""
    before = text[:position].rstrip()
    if not before or before[-1] in ";{}:":
        return True
    line = before.rsplit("\n", 1)[-1].lstrip()
    if line.startswith("#"):
        return "\n" in text[len(before) : position]
    return before[-1] == ")" and not _inside_parentheses(before)


def _inside_parentheses(before: str) -> bool:
    depth = 0
    for letter in reversed(before):
        if letter in ";{}" and depth == 0:
            return False
        depth += {")": 1, "(": -1}.get(letter, 0)
        if depth < 0:
            return True
    return False


def _declaration(
    text: str, position: int
) -> tuple[int, str, str, list[tuple[str, str]]] | None:
    """Parse ``[alignas(n)] T name[dims], name2;`` after the word threadgroup."""
    align = ""
    if match := _ALIGN.match(text, position):
        align, position = match.group(1).strip(), match.end()
    parsed = _element_type(text, position)
    if parsed is None:
        return None
    elem, position = parsed
    variables = []
    while True:
        match = _NAME.match(text, position)
        if match is None:
            return None
        name, position, dims = match.group(1), match.end(), ""
        while match := _DIMENSION.match(text, position):
            dims, position = dims + match.group(1), match.end()
        variables.append((name, dims))
        while position < len(text) and text[position].isspace():
            position += 1
        if text[position : position + 1] == ";":
            return position + 1, elem, align, variables
        if text[position : position + 1] != ",":
            return None
        position += 1


def _element_type(text: str, position: int) -> tuple[str, int] | None:
    """Parse a type name such as ``uint``, ``metal::vec<T, 4>`` or ``unsigned int``."""
    words = re.compile(r"\s*((?:::)?[A-Za-z_][\w]*(?:\s*::\s*[A-Za-z_]\w*)*)")
    parts = []
    while match := words.match(text, position):
        word, end = match.group(1), match.end()
        following = text[end:].lstrip()[:1]
        if parts and parts[-1] not in _PREFIXES:
            break
        parts.append(word)
        position = end
        if following == "<":
            opened = text.index("<", end)
            close = _closing_angle(text, opened)
            if close is None:
                return None
            parts[-1] += text[opened : close + 1]
            position = close + 1
            if match := re.compile(r"\s*::\s*\w+").match(text, position):
                parts[-1] += match.group()
                position = match.end()
    if not parts:
        return None
    return " ".join(p for p in parts if p not in ("const", "volatile")), position


_PREFIXES = ("unsigned", "signed", "const", "volatile", "typename", "struct")


def _closing_angle(text: str, opened: int) -> int | None:
    depth = 0
    round_depth = 0
    for i in range(opened, len(text)):
        letter = text[i]
        round_depth += {"(": 1, ")": -1}.get(letter, 0)
        if letter in ";{}":
            return None
        if round_depth == 0 and letter in "<>":
            depth += 1 if letter == "<" else -1
            if depth == 0:
                return i
    return None
