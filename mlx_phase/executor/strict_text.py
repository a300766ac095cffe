"""MLX's kernel text in the words of C++ for OpenCL, line for line."""

from __future__ import annotations

import re

from .signature import MetalSource
from .text import remove_attributes, rewrite_threadgroup, strip_comments


def strict_text(made: MetalSource) -> str:
    """The text for clang: MLX's, with what C++ for OpenCL writes differently."""
    header = _constructors(_without_includes(strip_comments(made.header)))
    source = _constructors(strip_comments(made.source), made.header)
    parts = (
        ("header", header),
        ("generated", remove_attributes(made.signature)),
        ("source", rewrite_threadgroup(source, _storage)),
        ("generated", "}\n" + remove_attributes(made.instantiation)),
    )
    return "".join(f'#line 1 "{where}"\n{text}\n' for where, text in parts)


def _without_includes(text: str) -> str:
    return re.sub(r"(?m)^[ \t]*#[ \t]*include[ \t]*<metal_\w+>", "", text)


def _storage(elem: str, name: str, dims: str, align: str) -> str:
    """A threadgroup variable as a reference, whose declaration tells its size."""
    size = f"(long)msl_storage<sizeof({elem}{dims})>()"
    # A name of its own: `uint4 (` would be taken for a call.
    own = f"msl_type_of_{name}"
    return (
        f"typedef {elem} {own}; "
        f"threadgroup {own} (&{name}){dims} = *(threadgroup {own} (*){dims}){size};"
    )


def _constructors(text: str, declared: str = "") -> str:
    """vec<T, 4>(a, b, c, d) and V(...), V an alias of a vec, as calls."""
    text = re.sub(r"\b(?:metal\s*::\s*)?vec\s*<", "vec<", text)
    out, start = [], 0
    for match in re.finditer(r"\bvec<", text):
        closing = _closing(text, match.end() - 1)
        following = text[closing + 1 :].lstrip()[:1] if closing else ""
        if closing and following == "(" and match.start() >= start:
            name = text[match.start() : closing + 1]
            out += [text[start : match.start()], f"msl_make<{name}>"]
            start = closing + 1
    text = "".join(out) + text[start:]
    aliases = re.findall(
        r"\busing\s+(\w+)\s*=\s*(?:metal\s*::\s*)?vec\s*<[^;]*;"
        r"|\btypedef\s+vec\s*<[^;]*?>\s*(\w+)\s*;",
        declared + "\n" + text,
    )
    for alias in {a or b for a, b in aliases}:
        text = re.sub(rf"(?<![\w:.]){alias}\s*\(", f"msl_make<{alias}>(", text)
    return text


def _closing(text: str, opening: int) -> int | None:
    depth = 0
    for i in range(opening, len(text)):
        depth += {"<": 1, ">": -1}.get(text[i], 0)
        if text[i] in ";{}":
            return None
        if depth == 0:
            return i
    return None
