"""Rule 1: every pointer and reference names its address space."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .msl_tokens import SPACES, Text, Token, open_angle

_SCALARS = (
    "bool char uchar short ushort int uint long ulong half float bfloat double".split()
)
TYPES = frozenset(
    _SCALARS
    + [f"{t}{n}" for t in _SCALARS for n in (2, 3, 4)]
    + [f"{u}int{n}_t" for u in ("", "u") for n in (8, 16, 32, 64)]
    + "size_t ptrdiff_t void auto bfloat16_t float16_t complex64_t vec unsigned".split()
    + "signed atomic atomic_int atomic_uint atomic_float simdgroup_matrix".split()
    + [f"simdgroup_{t}8x8" for t in ("half", "float", "bfloat")]
)
_NO_SPACE = "names no address space (device, threadgroup, constant or thread)"


def unnamed_spaces(
    parsed: Text, types: frozenset[str]
) -> Iterator[tuple[str, int, str]]:
    """Rule 1: every declared pointer and reference names its address space."""
    tokens = parsed.tokens
    for i, token in enumerate(tokens):
        if token.text not in ("*", "&", "&&") or i == 0:
            continue
        start = _type_start(tokens, i, types)
        if start is not None and not _named(tokens, start, i):
            what = "pointer" if token.text == "*" else "reference"
            yield "1", token.line, f"this {what} {_NO_SPACE}"


def _type_start(tokens: Sequence[Token], i: int, types: frozenset[str]) -> int | None:
    """Where the type before the "*" or "&" at ``i`` starts; None for arithmetic."""
    j = i - 1
    if tokens[j].text == "(":  # T (&a)[N] and T (*)[N], not T(*p)
        after = [t.text for t in tokens[i + 1 : i + 4]]
        if after[:2] != [")", "["] and after[1:3] != [")", "["]:
            return None
        j -= 1
    while j > 0 and tokens[j].text in SPACES | {"const", "volatile", "*"}:
        j -= 1
    if tokens[j].text == ">":
        opening = open_angle(tokens, j)
        if opening is None or opening == 0 or tokens[opening - 1].text not in types:
            return None
        return opening - 1
    if tokens[j].kind != "name":
        return None
    if j >= 2 and tokens[j - 1].text == "::":  # typename A<T>::type *
        head = j
        while head > 0 and tokens[head].text not in (";", "{", "}", "(", ",", "<"):
            angle = open_angle(tokens, head) if tokens[head].text == ">" else None
            head = (angle or head) - 1
            if tokens[head].text == "typename":
                return head
    return j if tokens[j].text in types else None


def _named(tokens: Sequence[Token], start: int, i: int) -> bool:
    """Whether a space is named for the level of indirection at ``i``."""
    level = [t.text for t in tokens[start + 1 : i]]
    if "*" in level:  # the outer of two pointers: only what stands between them
        return bool(SPACES & set(level[len(level) - level[::-1].index("*") :]))
    if SPACES & set(level):
        return True
    for j in range(start - 1, -1, -1):
        text = tokens[j].text
        if text in SPACES:
            return True
        if text in (";", "{", "}", "(", ")", ",", "<", "=", ">"):
            return False
    return False
