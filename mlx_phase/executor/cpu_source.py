"""Turns a kernel's Metal text into C++ for the CPU executor's headers.

Line numbers stay those of the user's `source` and `header`, which errors name.
"""

from __future__ import annotations

import re

from mlx_phase.executor import text
from mlx_phase.executor.cpu_build import PRELUDE
from mlx_phase.executor.signature import MetalSource
from mlx_phase.executor.twins import drop_twins

_METAL_INCLUDE = re.compile(r"^[ \t]*#[ \t]*include[ \t]*<metal[^>\n]*>.*$", re.M)
_PRAGMA = re.compile(r"^[ \t]*#[ \t]*pragma[ \t]+(?:METAL|once)\b.*$", re.M)

#: Metal attribute -> C++ on the lane `l` and its worker `w`.
_ATTRIBUTES = {
    "dispatch_quadgroups_per_threadgroup": "(emu::threads(w->launch->group) + 3) / 4",
    "dispatch_simdgroups_per_threadgroup": "(emu::threads(w->launch->group) + 31) / 32",
    "dispatch_threads_per_threadgroup": "emu::three(w->launch->group)",
    "grid_origin": "uint3(0u)",
    "grid_size": "emu::three(w->launch->grid)",
    "quadgroup_index_in_threadgroup": "l->index / 4",
    "quadgroups_per_threadgroup": "(w->count + 3) / 4",
    "simdgroup_index_in_threadgroup": "l->index / 32",
    "simdgroups_per_threadgroup": "(w->count + 31) / 32",
    "thread_execution_width": "32u",
    "thread_index_in_quadgroup": "l->index % 4",
    "thread_index_in_simdgroup": "l->lane",
    "thread_index_in_threadgroup": "l->index",
    "thread_position_in_grid": "emu::global(l)",
    "thread_position_in_threadgroup": "emu::three(l->local)",
    "threadgroup_position_in_grid": "emu::three(w->position)",
    "threadgroups_per_grid": "emu::three(w->launch->groups)",
    "threads_per_grid": "emu::three(w->launch->grid)",
    "threads_per_simdgroup": "32u",
    "threads_per_threadgroup": "emu::three(w->size)",
}


def _shared(elem: str, name: str, dims: str, align: str) -> str:
    """A threadgroup variable becomes a reference into the threadgroup's memory.

    Its type may depend on template arguments; the local struct keeps two variables of
    one type apart.
    """
    kind, tag = f"emu_{name}_type", f"emu_{name}_tag"
    return (
        f"struct {tag} {{}}; using {kind} = {elem}{dims}; "
        f"{kind}& {name} = emu::shared<{kind}, {tag}, {align or 0}>();"
    )


def rewrite(metal: str) -> str:
    """Rewrite Metal text that the headers' macros cannot take. Lines are kept."""
    metal = text.strip_comments(metal)
    metal = drop_twins(_PRAGMA.sub("", _METAL_INCLUDE.sub("", metal)))
    return text.rewrite_threadgroup(text.remove_attributes(metal), _shared)


def cpu_source(metal: MetalSource) -> str:
    """C++ of one specialised kernel, with the entry that the runtime calls.

    ``args`` of the launch hold one pointer for each of ``metal.params``.
    """
    header, source = rewrite(metal.header), rewrite(metal.source)
    passed = []
    for i, param in enumerate(metal.params):
        pointer = f"({param.type[:-1]}*)args[{i}]"
        passed.append(f"*{pointer}" if param.type[-1] == "&" else pointer)
    passed += [_ATTRIBUTES[name] for name, _ in metal.attributes]
    arguments = ", ".join(passed)
    return (
        f"{text.swizzle_macros(header + source)}"
        f"{PRELUDE}"
        f'#line 1 "header"\n{header}\n'
        f'#line 1 "signature"\n{text.remove_attributes(metal.signature)}'
        f'#line 1 "source"\n{source}\n}}\n'
        '#line 1 "launch"\n'
        'extern "C" __attribute__((visibility("default"))) void emu_entry(EmuLane* l) {'
        "\n  EmuWorker* w = l->worker;\n  void** args = w->launch->args;\n"
        f"  EMU_CALL({metal.specialised_name})({arguments});\n}}\n"
    )
