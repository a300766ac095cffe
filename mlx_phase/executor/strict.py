"""Strict check: would every Mac's Metal compiler take this kernel?

clang in C++ for OpenCL mode has Metal's address spaces: with the generic space it
follows MSL 4.1's rules for a pointer without one, without it those up to 4.0. The
text MLX generates is compiled both ways against declarations of the Metal library
(include/metal_strict.h), warnings as errors; ``lint`` adds what that compiler lets
pass. Nothing is run; a kernel takes about a quarter of a second of CPU time.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .error import ExecutorError
from .lint import Finding, collective_helpers, declared_types, lint
from .lowered import bfloat_findings, sum_findings
from .signature import Arg, MetalSource, metal_source
from .strict_text import strict_text
from .text import strip_comments

_INCLUDE = Path(__file__).parent / "include"
MAX_BUFFERS = 31
MAX_THREADGROUP_BYTES = 32768
# Generic address space or not, and how far the code is optimised.
_VERSIONS = {"4.0": ("-", "-O0"), "4.1": ("+", "-O1")}
_FLAGS = (
    "-cc1 -x clcpp -cl-std=clc++2021 -triple spir64-unknown-unknown "
    "-cl-single-precision-constant -ffp-contract=off -fno-caret-diagnostics "
    "-ferror-limit 60 -Werror -Wall -Wextra -Wpre-c++17-compat "
    "-Wno-unknown-attributes -Wno-unknown-pragmas -Wno-unused-parameter "
    "-Wno-sign-compare -Wno-unused-value "
    "-Wno-bitwise-op-parentheses -Wno-logical-op-parentheses "
    "-Wno-shift-op-parentheses -Wno-error=deprecated-declarations"
).split()
_DIAGNOSTIC = re.compile(
    r"(?P<file>[^\n:]*):(?P<line>\d+):\d+: (?P<kind>error|warning|note): (?P<text>.*)"
)
_STORAGE = re.compile(r"'msl_storage<(\d+)\w*>' is deprecated")
# What clang says -> the rule it breaks, first match wins.
_RULES = (
    (r"incompatible with C\+\+ standards before C\+\+17", "6"),
    (r"variable cannot be declared in (local|constant) address space", "3"),
    (r"must reside in constant address space", "4"),
    (
        r"address space|__generic|(rvalue|deduced|adjusted) .*__(private|global|local)",
        "1",
    ),
    (r"C\+\+ for OpenCL|pointers to functions|exceptions disabled|OpenCL|fp64", "5"),
    (r"simdgroup_matrix", "12"),
)
# Copies of plain structs across address spaces: Metal generates them, clang does not.
_COPIES = re.compile(r"\(the implicit (copy|move) (constructor|assignment operator)\)")


def check(
    name: str,
    inputs: Sequence[Arg],
    outputs: Sequence[Arg],
    source: str,
    header: str = "",
    template: Sequence[tuple[str, object]] | None = None,
    *,
    exact_rows: bool = False,
    both_spaces: Sequence[str] = (),
    atomic_outputs: bool = False,
) -> list[Finding]:
    """What a Metal compiler, or Metal's rules, would object to in one kernel.

    Args:
        name: kernel name, as for ``metal_kernel``.
        inputs: arrays as the signature sees them; under 8 elements is ``constant``.
        outputs: result arrays.
        source: body of the kernel; lines of findings count from its first.
        header: helper code; findings there have ``where == "header"``.
        template: ``[(name, value), ...]`` of bools, ints and dtypes.
        exact_rows: results must have the same bits in every instance (rule 14):
            also report products and sums that a compiler may fuse.
        both_spaces: names of inputs to check once more in the other address space.
        atomic_outputs: outputs are atomics.

    Raises ExecutorError if clang is missing, ValueError for a bad template argument or
    an unknown name in ``both_spaces``.
    """
    unknown = set(both_spaces) - {arg.name for arg in inputs}
    if unknown:
        raise ValueError(
            f"both_spaces names {sorted(unknown)}, which are no inputs of {name}: "
            f"{[arg.name for arg in inputs]}"
        )
    made = metal_source(name, inputs, outputs, source, header, template, atomic_outputs)
    found = _lint(made) + _limits(made)
    found += _compiled(made, exact_rows)
    for i, arg in enumerate(inputs):
        if arg.name in both_spaces and arg.ndim:  # a 0-d array is always constant
            other = replace(arg, size=8 if arg.is_constant else 7)
            varied = [*inputs[:i], other, *inputs[i + 1 :]]
            again = metal_source(
                name, varied, outputs, source, header, template, atomic_outputs
            )
            space = "constant" if other.is_constant else "device"
            old = {(f.where, f.line, f.rule) for f in found}
            found += [
                replace(f, message=f"{f.message} [with '{arg.name}' in {space}]")
                for f in _compiled(again, False)
                if (f.where, f.line, f.rule) not in old
            ]
    return sorted(set(found), key=lambda f: (f.where, f.line, f.rule, f.message))


def assert_clean(*args: Any, **options: Any) -> None:
    """Raise ExecutorError that lists the findings of :func:`check` (same arguments)."""
    found = check(*args, **options)
    if found:
        lines = "\n".join(f"  {f}" for f in found)
        raise ExecutorError(
            f"the strict check has {len(found)} finding(s) and a Mac may refuse this "
            f"kernel; change these lines:\n{lines}"
        )


def _lint(made: MetalSource) -> list[Finding]:
    types = declared_types(made.header)
    types |= {a.name for a in made.template if a.kind == "typename"}
    found = lint(made.header, where="header", types=types)
    helpers = collective_helpers(made.header)
    found += lint(made.source, body=True, types=types, collectives=helpers)
    text = strip_comments(made.header + "\n" + made.source)
    matrix = re.search(r"\bsimdgroup_(matrix|\w+8x8)\b", text)
    if matrix and "<metal_simdgroup_matrix>" not in made.header:
        message = "simdgroup_matrix needs '#include <metal_simdgroup_matrix>'"
        found.append(Finding("12", 1, message, "header" if made.header else "source"))
    return found


def _limits(made: MetalSource) -> list[Finding]:
    found = []
    if len(made.params) > MAX_BUFFERS:
        message = f"{len(made.params)} buffers; Metal has {MAX_BUFFERS} (shapes count)"
        found.append(Finding("limits", 1, message))
    if not made.is_valid:
        message = "MLX closes the parameter list early: name a grid attribute"
        found.append(Finding("limits", 1, message))
    return found


def _compiled(made: MetalSource, exact_rows: bool) -> list[Finding]:
    """Findings of both compilers, and of the code the second one makes."""
    text = strict_text(made)
    runs = {version: _clang(text, version) for version in _VERSIONS}
    by_version = {version: list(_diagnose(run)) for version, run in runs.items()}
    both = set(by_version["4.0"]) & set(by_version["4.1"])
    found = sorted(both, key=lambda f: f.line)
    for version, findings in by_version.items():
        rule = "up to MSL 4.0" if version == "4.0" else "from MSL 4.1"
        found += [
            replace(f, message=f"{f.message} [{rule}]")
            for f in findings
            if f not in both
        ]
    # Optimised code narrows float sums of bfloats, plain code has no unrolled loops.
    found += bfloat_findings(runs["4.0"].stdout)
    return found + sum_findings(runs["4.1"].stdout, exact_rows)


_CODE = "-emit-llvm -debug-info-kind=line-tables-only -dwarf-version=4 -o -".split()


def _diagnose(run: subprocess.CompletedProcess[str]) -> Iterator[Finding]:
    """Findings from clang's messages."""
    groups: list[list[re.Match[str]]] = []
    for match in map(_DIAGNOSTIC.match, run.stderr.splitlines()):
        if match and match["kind"] == "note" and groups:
            groups[-1].append(match)
        elif match:
            groups.append([match])
    if run.returncode and not groups:
        raise ExecutorError(f"clang failed on the strict check:\n{run.stderr[-2000:]}")
    memory = 0
    for first, *notes in groups:
        size = _STORAGE.search(first["text"])
        if size:
            memory += int(size.group(1))
            if memory > MAX_THREADGROUP_BYTES >= memory - int(size.group(1)):
                message = (
                    f"more than {MAX_THREADGROUP_BYTES} bytes of threadgroup memory"
                )
                yield Finding("limits", int(first["line"]), message)
            continue
        copies = any(_COPIES.search(note["text"]) for note in notes)
        if copies or "object in address space unqualified" in first["text"]:
            continue
        place = next((m for m in (first, *notes) if m["file"] in _OURS), first)
        if place["file"].endswith(".h") and len(groups) > 1:
            continue  # inside our own declarations: another message names the place
        where = place["file"] if place["file"] in _OURS else "generated"
        message = re.sub(r" \[-W[^\]]*\]$", "", first["text"])
        said = message
        why = [n["text"] for n in notes if n["text"].startswith("candidate")]
        if message.startswith("no matching") and why:
            said = re.sub(r"^candidate[^:]*: ", "", why[0])
            message += f": {said}"
        rule = next((rule for pattern, rule in _RULES if re.search(pattern, said)), "7")
        yield Finding(rule, int(place["line"]), _in_metal_words(message), where)


_OURS = ("header", "source")


def _in_metal_words(message: str) -> str:
    for ours, metal in (
        ("__global", "device"),
        ("__local", "threadgroup"),
        ("__constant", "constant"),
        ("__private", "thread"),
        ("__generic", "generic"),
        ("__bf16", "bfloat"),
    ):
        message = message.replace(ours, metal)
    return message


def _clang(text: str, version: str) -> subprocess.CompletedProcess[str]:
    """LLVM text on stdout: plain under 4.0's rules, optimised under 4.1's."""
    command = [*_command(version), "-include-pch", _declarations(version), *_CODE, "-"]
    return subprocess.run(
        command, input=text, capture_output=True, text=True, timeout=60
    )


def _command(version: str) -> list[str]:
    space, level = _VERSIONS[version]
    extensions = f"-all,+cl_khr_fp16,{space}__opencl_c_generic_address_space"
    return [_compiler(), "clang", *_FLAGS, level, f"-cl-ext={extensions}"]


_folders: list[tempfile.TemporaryDirectory[str]] = []  # removed when the process ends


@cache
def _declarations(version: str) -> str:
    """metal_strict.h parsed once per process: it is most of a check's time."""
    _folders.append(tempfile.TemporaryDirectory(prefix="mlx-phase-strict-"))
    path = str(Path(_folders[-1].name) / "metal_strict.pch")
    command = [*_command(version), f"-I{_INCLUDE}", "-emit-pch", "-o", path, "-"]
    run = subprocess.run(
        command,
        input='#include "metal_strict.h"\n',
        capture_output=True,
        text=True,
        timeout=60,
    )
    if run.returncode:
        raise ExecutorError(
            f"clang does not take metal_strict.h:\n{run.stderr[-2000:]}"
        )
    return path


@cache
def _compiler() -> str:
    """Path of the zig program, which is a clang too."""
    spec = find_spec("ziglang")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        program = Path(folder) / ("zig.exe" if sys.platform == "win32" else "zig")
        if program.exists():
            return str(program)
    raise ExecutorError(
        "the strict check needs clang, which the ziglang package brings: "
        "pip install ziglang"
    )
