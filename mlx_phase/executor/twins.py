"""Definitions that differ in nothing but address spaces.

Metal tells `device T*` from `thread T*`; where those words mean nothing, a second
specialisation or overload becomes a redefinition. It is dropped, and its lines stay.
"""

from __future__ import annotations

import re

_SPACES = re.compile(r"\b(?:device|threadgroup|thread|constant)\b")
_DIRECTIVE = re.compile(r"^[ \t]*#(?:[^\n\\]|\\.|\\\n)*", re.MULTILINE)
_BRACE = re.compile(r"[{};]")
_NAMESPACE = re.compile(r"(?:inline\s+)?(?:namespace\b[\w\s:]*|extern\s*\"C\"\s*)\Z")
_BLANK = re.compile(r"\s+")


def drop_twins(text: str) -> str:
    """Drop namespace-level definitions that repeat an earlier one but for its spaces.

    ``text`` must be free of comments. Equal texts stay: they may stand in the two
    branches of an #if.
    """
    # Directives are no part of a definition, and their braces do not count.
    plain = _DIRECTIVE.sub(lambda m: re.sub(r"[^\n]", " ", m.group()), text)
    first: dict[str, str] = {}
    out = []
    kept = start = 0
    depth = 0
    for brace in _BRACE.finditer(plain):
        mark, at = brace.group(), brace.start()
        if depth == 0 and (mark != "{" or _is_namespace(plain[start:at])):
            start = at + 1
        elif mark == "{":
            depth += 1
        elif mark == "}":
            depth -= 1
            if depth:
                continue
            end = at + 1
            found = _BLANK.sub(" ", plain[start:end]).strip()
            bare = _BLANK.sub("", _SPACES.sub("", found))
            if first.setdefault(bare, found) != found:
                out.append(text[kept:start])
                out.append("\n" * text.count("\n", start, end))
                kept = end
            start = end
    return "".join(out) + text[kept:]


def _is_namespace(before: str) -> bool:
    return _NAMESPACE.fullmatch(before.strip()) is not None
