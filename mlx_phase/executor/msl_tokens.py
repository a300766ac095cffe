"""Tokens, scopes and functions of a Metal text: what the lint rules look at.

This is no parser. It knows brackets, heads of blocks and where a function starts, which
is enough for rules that a person could check with a pencil.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

_TOKEN = re.compile(
    r"(?P<space>[ \t\r\f\v]+|\\\n)|(?P<newline>\n)"
    r"|(?P<comment>//[^\n]*|/\*.*?\*/)"
    r"|(?P<directive>\#(?:\\\n|[^\n])*)"
    r"|(?P<string>\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*')"
    r"|(?P<name>[A-Za-z_]\w*)"
    r"|(?P<number>\.?\d(?:[eE][+-]|[\w.'])*)"
    r"|(?P<mark>\.\.\.|<<=|->|::|<<|&&|\|\||[-+*/%&|^<>=!]=|\+\+|--|[^\w\s])",
    re.S,
)
# ">>" stays two tokens: it closes templates far more often than it shifts.
CLOSING = {"(": ")", "[": "]", "{": "}"}
SPACES = frozenset({"device", "threadgroup", "constant", "thread"})


@dataclass(frozen=True)
class Token:
    """One token: kind (name, number, string or mark), text and line (from 1)."""

    kind: str
    text: str
    line: int


@dataclass(frozen=True)
class Function:
    """A function: token indices of its head, its "(" ... ")" and its body.

    ``start`` is where the head starts, ``end`` one past the last token, ``body`` the
    index of "{" (``end`` for a declaration), ``owner`` the struct around it or "".
    """

    name: str
    owner: str
    start: int
    open: int
    close: int
    body: int
    end: int


@dataclass
class Text:
    """A tokenised text: tokens, directives as (line, text), and per token its scope."""

    tokens: list[Token] = field(default_factory=list)
    directives: list[tuple[int, str]] = field(default_factory=list)
    scopes: list[str] = field(default_factory=list)
    functions: list[Function] = field(default_factory=list)
    #: (start, end, scope, owner) of statements and declarations outside functions
    outside: list[tuple[int, int, str, str]] = field(default_factory=list)


def tokenize(text: str) -> tuple[list[Token], list[tuple[int, str]]]:
    """Tokens and preprocessor directives of ``text``; comments are dropped."""
    tokens: list[Token] = []
    directives: list[tuple[int, str]] = []
    line = 1
    for match in _TOKEN.finditer(text):
        kind, value = match.lastgroup or "mark", match.group()
        if kind == "directive":
            directives.append((line, value))
        elif kind not in ("space", "newline", "comment"):
            tokens.append(Token(kind, value, line))
        line += value.count("\n")
    return tokens, directives


def match_close(tokens: Sequence[Token], start: int) -> int:
    """Index of the bracket that closes ``tokens[start]``, or the last index."""
    opening = tokens[start].text
    closing = CLOSING[opening]
    depth = 0
    for i in range(start, len(tokens)):
        if tokens[i].text == opening:
            depth += 1
        elif tokens[i].text == closing:
            depth -= 1
            if depth == 0:
                return i
    return len(tokens) - 1


def close_angle(tokens: Sequence[Token], start: int) -> int | None:
    """Index of the ">" that closes ``tokens[start]``, or None if that is "less"."""
    depth = 0
    i = start
    while i < len(tokens):
        text = tokens[i].text
        if text in CLOSING:
            i = match_close(tokens, i)
        elif text == "<":
            depth += 1
        elif text == ">":
            depth -= 1
            if depth == 0:
                return i
        elif text in (";", ")", "]", "}", "&&", "||"):
            return None
        i += 1
    return None


def open_angle(tokens: Sequence[Token], end: int) -> int | None:
    """Index of the "<" that ``tokens[end]`` (">") closes, or None."""
    depth = 0
    for i in range(end, -1, -1):
        text = tokens[i].text
        if text == ">":
            depth += 1
        elif text == "<":
            depth -= 1
            if depth == 0:
                return i
        elif text in (";", "{", "}"):
            return None
    return None


def skip_template(tokens: Sequence[Token], start: int, end: int) -> int:
    """First index past "template <...>" and "[[...]]" prefixes of a head."""
    while start < end:
        if tokens[start].text == "template" and tokens[start + 1].text == "<":
            closing = close_angle(tokens, start + 1)
            start = end if closing is None else closing + 1
        elif tokens[start].text == "[":
            start = match_close(tokens, start) + 1
        else:
            break
    return start


def _call_open(tokens: Sequence[Token], start: int, end: int) -> int | None:
    """Index of the "(" of a function's parameters within a head, or None."""
    i = skip_template(tokens, start, end)
    while i < end:
        text = tokens[i].text
        if text == "(" and tokens[i - 1].text not in ("alignas", "__attribute__"):
            return i if i > start else None
        if text in ("=", "{"):
            return None
        if text == "operator":
            if tokens[i + 1].text == "(" and tokens[i + 2].text == ")":
                return i + 3
            return next((j for j in range(i, end) if tokens[j].text == "("), None)
        if text in ("(", "["):
            i = match_close(tokens, i)
        elif text == "<":
            closing = close_angle(tokens, i)
            i = i if closing is None else closing
        i += 1
    return None


def scan(text: str, *, body: bool = False) -> Text:
    """Tokenise ``text`` and find its scopes, functions and outer statements.

    ``body``: the text is the inside of a kernel, not a file.
    """
    out = Text()
    tokens, out.directives = tokenize(text)
    out.tokens = tokens
    base = "function" if body else "namespace"
    stack: list[tuple[str, str, Function | None]] = [(base, "", None)]
    start = i = 0
    while i < len(tokens):
        mark = tokens[i].text
        scope, owner, _ = stack[-1]
        out.scopes.append(scope)
        if mark in ("(", "[") and scope in ("namespace", "struct"):
            closing = match_close(tokens, i)  # brackets hold no statements here
            out.scopes.extend([scope] * (closing - i))
            i = closing
        elif mark == "{":
            stack.append(_open_block(tokens, start, i, scope, owner))
            if stack[-1][0] != "init":
                start = i + 1
        elif mark == "}" and len(stack) > 1:
            kind, _, function = stack.pop()
            if function is not None:
                out.functions.append(replace(function, end=i + 1))
            if kind != "init":
                start = i + 1
        elif mark == ";":
            if scope in ("namespace", "struct"):
                _outer_statement(out, start, i, scope, owner)
            start = i + 1
        elif mark == ":" and tokens[i - 1].text in ("public", "private", "protected"):
            start = i + 1
        i += 1
    return out


def _open_block(
    tokens: Sequence[Token], start: int, brace: int, scope: str, owner: str
) -> tuple[str, str, Function | None]:
    head = [t.text for t in tokens[start:brace]]
    if scope in ("function", "init"):
        return "function" if scope == "function" else "init", owner, None
    if "namespace" in head:
        return "namespace", "", None
    first = skip_template(tokens, start, brace)
    opening = _call_open(tokens, start, brace)
    if opening is None and first < brace and tokens[first].text in ("struct", "class"):
        names = [t.text for t in tokens[first + 1 : brace] if t.kind == "name"]
        return "struct", (names or [""])[0], None
    if opening is None:
        return "init", owner, None
    return "function", owner, _function(tokens, start, opening, brace, owner, brace)


def _function(
    tokens: Sequence[Token], start: int, opening: int, body: int, owner: str, end: int
) -> Function:
    closing = match_close(tokens, opening)
    before = tokens[opening - 1]
    name = before.text if before.kind == "name" else "operator"
    return Function(name, owner, start, opening, closing, body, end)


def _outer_statement(out: Text, start: int, end: int, scope: str, owner: str) -> None:
    if start >= end:
        return
    opening = _call_open(out.tokens, start, end)
    first = out.tokens[skip_template(out.tokens, start, end)].text
    if opening is not None and first not in ("static_assert", "using", "typedef"):
        out.functions.append(_function(out.tokens, start, opening, end, owner, end))
    else:
        out.outside.append((start, end, scope, owner))
