"""Rules of Metal text that a compiler for another language does not know.

``lint`` reads text alone and needs no compiler. Rule names are the numbers of the
project's MSL rules: 1 address spaces, 2 member functions, 3 threadgroup variables,
4 program scope, 5 not in Metal, 6 C++14, 11 collectives; "text" is what MLX's loader
asks of any source. ``strict`` adds what needs a compiler.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from .divergence import collective_functions, divergent_collectives
from .lint_spaces import TYPES, unnamed_spaces
from .msl_tokens import SPACES, Text, Token, scan, skip_template


@dataclass(frozen=True)
class Finding:
    """What is wrong, by which rule, in which line (from 1) of which text."""

    rule: str
    line: int
    message: str
    where: str = "source"

    def __str__(self) -> str:
        return f"{self.where}:{self.line}: rule {self.rule}: {self.message}"


HEADERS = frozenset(
    "stdlib math simdgroup simdgroup_matrix atomic common compute integer geometric "
    "relational pack logging types type_traits limits".split()
)
_FORBIDDEN = {
    "goto": "goto is not in Metal",
    "try": "Metal has no exceptions",
    "catch": "Metal has no exceptions",
    "throw": "Metal has no exceptions",
    "virtual": "Metal has no virtual functions",
    "new": "Metal has no new",
    "delete": "Metal has no delete",
    "dynamic_cast": "Metal has no RTTI",
    "typeid": "Metal has no RTTI",
    "thread_local": "Metal has no thread_local",
    "double": "Metal has no double; write float",
    "std": "Metal has no C++ library; use namespace metal",
    "asm": "Metal has no inline assembly",
}
_CONSTANT = frozenset({"constant", "MLX_MTL_CONST", "MTL_CONST"})


def declared_types(text: str) -> frozenset[str]:
    """Names that ``text`` declares as types: structs, aliases, type parameters."""
    found = re.findall(r"\b(?:struct|class|typename|enum|using)\s+(\w+)", text)
    found += re.findall(r"\btypedef\b[^;]*?(\w+)\s*;", text)
    return frozenset(found)


def collective_helpers(text: str) -> frozenset[str]:
    """Functions of a header that reach a simd function or a barrier."""
    return collective_functions(scan(text))


def lint(
    text: str,
    *,
    body: bool = False,
    where: str = "source",
    types: Iterable[str] = (),
    collectives: Iterable[str] = (),
) -> list[Finding]:
    """Findings in ``text``, ordered by line.

    Args:
        text: a header or the body of a kernel.
        body: the text is the inside of a kernel function (``source``).
        where: what findings call the text.
        types: names of types declared elsewhere (see :func:`declared_types`).
        collectives: names of functions elsewhere that reach a simd function or barrier.
    """
    parsed = scan(text, body=body)
    known = TYPES | frozenset(types) | declared_types(text)
    named = frozenset(collectives) | collective_functions(parsed)
    pairs = [*_text_rules(text, parsed)]
    for rule in (_words, _patterns, _outer, _threadgroup, _members, _recursion):
        pairs += rule(parsed)
    pairs += unnamed_spaces(parsed, known)
    pairs += [("11", *found) for found in divergent_collectives(parsed, body, named)]
    findings = {Finding(rule, line, message, where) for rule, line, message in pairs}
    return sorted(findings, key=lambda f: (f.line, f.rule, f.message))


_Found = Iterator[tuple[str, int, str]]


def _text_rules(text: str, parsed: Text) -> _Found:
    for number, line in enumerate(text.split("\n"), 1):
        if not line.isascii():
            yield "text", number, "only ASCII: MLX hands the source over as ASCII"
    included = set()
    for line, directive in parsed.directives:
        match = re.match(r"#\s*include\s*(\S+)", directive)
        if match:
            name = re.fullmatch(r"<metal_(\w+)>", match.group(1))
            included.add(name and name.group(1))
            if not name or name.group(1) not in HEADERS:
                message = f"{match.group(1)} is not there when MLX compiles the text"
                yield "text", line, message
        for word in re.findall(r"[A-Za-z_]\w*", directive):
            if word in _FORBIDDEN and directive.lstrip("# ").startswith("define"):
                yield "5", line, _FORBIDDEN[word]


def _words(parsed: Text) -> _Found:
    tokens = parsed.tokens
    for i, token in enumerate(tokens):
        after = tokens[i + 1].text if i + 1 < len(tokens) else ""
        if token.text in _FORBIDDEN and (token.text != "std" or after == "::"):
            deleted = token.text == "delete" and tokens[i - 1].text == "="
            if not deleted:
                yield "5", token.line, _FORBIDDEN[token.text]
        elif token.text == "static" and parsed.scopes[i] == "function":
            yield "4", token.line, "Metal has no static locals"
        elif token.text == "this" and after != "->":
            message = "'this' is passed on: its address space differs between versions"
            yield "2", token.line, message
        elif token.text == "decltype":
            message = "decltype may carry an address space in 4.1: name the type"
            yield "2", token.line, message


def _patterns(parsed: Text) -> _Found:
    tokens = parsed.tokens
    texts = [t.text for t in tokens]
    operators = set("+ - * / % & | ^ < > = && || , ==".split())
    for i, text in enumerate(texts):
        line = tokens[i].line
        following = texts[i + 1 : i + 5] + [""] * 4
        before = tokens[i - 1] if i else Token("mark", ";", 0)
        if text == "if" and following[0] == "constexpr":
            yield "6", line, "'if constexpr' is C++17; macOS 14 and 15 take C++14"
        elif text == "auto" and "[" in following[:2] and following[0] in "[&&&":
            yield "6", line, "structured bindings are C++17"
        elif text == "namespace" and following[1] == "::" and before.text != "using":
            yield "6", line, "nested namespace definitions are C++17"
        elif text == "...":
            if following[0] == ")" and before.text in (",", "("):
                outer = _before_paren(texts, i)
                if outer not in ("sizeof", "catch"):
                    yield "5", line, "Metal has no variadic functions"
            if following[0] in operators - {",", ">"} or before.text in operators - {
                ",",
                "<",
                "&",
                "&&",
                "*",
            }:
                yield "6", line, "fold expressions are C++17"
        elif text == "[" and following[0] != "[" and before.text != "[":
            value = before.kind in ("name", "number", "string") or before.text in ")]>"
            if not value or before.text == "return":
                yield "5", line, "lambdas are safe only from recent versions of Metal"
        elif text == "(" and following[0] in ("*", "&") and following[2] == ")":
            if following[3] == "(" and before.text not in ("sizeof",):
                yield "5", line, "Metal has no pointers to functions"


def _before_paren(texts: Sequence[str], i: int) -> str:
    depth = 0
    for j in range(i, -1, -1):
        depth += (texts[j] == ")") - (texts[j] == "(")
        if depth < 0:
            return texts[j - 1] if j else ""
    return ""


def _outer(parsed: Text) -> _Found:
    """Variables of program scope that are not constant, and inline ones."""
    tokens = parsed.tokens
    skip = set("using typedef struct class enum static_assert friend template".split())
    for start, end, scope, _ in parsed.outside:
        first = skip_template(tokens, start, end)
        words = [t.text for t in tokens[first:end]]
        declares = len(words) > 1 and words[0] not in skip and "operator" not in words
        if not declares:
            continue
        if "inline" in words:
            yield "6", tokens[first].line, "inline variables are C++17"
        if scope == "namespace" and not _CONSTANT & set(words):
            message = (
                f"'{_declared(words)}' has program scope: make it constant constexpr"
            )
            yield "4", tokens[first].line, message


def _declared(words: Sequence[str]) -> str:
    stop = next((i for i, w in enumerate(words) if w in ("=", "[", "{")), len(words))
    return words[stop - 1] if stop else words[0]


def _threadgroup(parsed: Text) -> _Found:
    """Threadgroup variables outside the kernel's body, or with an initialiser."""
    tokens = parsed.tokens
    inside = [(f.body, f.end) for f in parsed.functions if f.body < f.end]
    for i, token in enumerate(tokens):
        starts = i == 0 or tokens[i - 1].text in (";", "{", "}", ")")
        if token.text != "threadgroup" or not starts:
            continue
        stop = i
        while stop < len(tokens) and tokens[stop].text not in (";", "{", "=", "("):
            stop += 1
        words = {t.text for t in tokens[i:stop]}
        if stop == len(tokens) or words & {"*", "&"} or tokens[stop].text == "(":
            continue
        helper = any(start < i < end for start, end in inside)
        if helper or parsed.scopes[i] != "function":
            message = "threadgroup variables belong in the kernel's body (source)"
            yield "3", token.line, message
        elif tokens[stop].text != ";":
            yield "3", token.line, "threadgroup variables take no initialiser"


# What may stand between a member function's parameters and its body.
_BEHIND = ("const", "volatile", "noexcept", "override", "final")


def _members(parsed: Text) -> _Found:
    tokens = parsed.tokens
    for f in parsed.functions:
        if not f.owner or f.name == f.owner:
            continue
        # A macro that stands for a type, `PAIR(T) x;`, has a name behind it.
        behind = tokens[f.close + 1].text
        if behind.isidentifier() and behind not in (*SPACES, *_BEHIND):
            continue
        first = skip_template(tokens, f.start, f.open)
        head = [t.text for t in tokens[first : f.open]]
        if "operator" in head:
            head = head[: head.index("operator")]
        line = tokens[f.open].line
        plain = re.sub(r"<[^<>]*>", "", " ".join(head))
        if "*" in plain or "&" in plain:
            message = "a member function returns a reference or pointer"
            yield "2", line, message
        if not {"static", "friend", "~"} & set(head):
            after = {t.text for t in tokens[f.close + 1 : f.body]}
            if not after & (SPACES | {"const", "default", "delete"}):
                message = (
                    f"member function '{f.name}' needs 'const' or 'thread' after ')'"
                )
                yield "2", line, message


def _recursion(parsed: Text) -> _Found:
    """Functions that reach themselves; overloads and template steps are told apart."""
    tokens = parsed.tokens
    defined = [f for f in parsed.functions if f.body < f.end]
    names = [f.name for f in defined]
    single = {f.name: f for f in defined if names.count(f.name) == 1 and not f.owner}
    calls = {
        name: {
            tokens[i].text
            for i in range(f.body, f.end - 1)
            if tokens[i].text in single and tokens[i + 1].text == "("
        }
        for name, f in single.items()
    }
    for name, f in single.items():
        reached, todo = set(), set(calls[name])
        while todo:
            step = todo.pop()
            reached.add(step)
            todo |= calls[step] - reached
        if name in reached:
            yield "5", tokens[f.open].line, f"'{name}' is recursive; Metal has no stack"
