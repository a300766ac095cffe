"""Template rows of decode attention, for the checks that compile and do not run."""

from dataclasses import replace

from mlx_phase import source
from mlx_phase.chip import lookup
from mlx_phase.executor.signature import METAL_TYPES, Arg
from mlx_phase.launch.attention import template
from mlx_phase.launch.attention_reduce import reduce_launch
from mlx_phase.plan_attention import SdpaPlan, plan_sdpa
from mlx_phase.problem import Sdpa

# Every dtype, head-dim class, format, mask and mode; heads, rows and chips take turns.
GROUPS_OF_32 = {"k_group": 32, "v_group": 32}
PROBLEMS = (
    Sdpa(32, 8, 128, 128),
    Sdpa(32, 8, 128, 128, q_len=4, causal=True, lens=True, batch=2),
    Sdpa(32, 8, 64, 64, dtype="float16", mask="bool", sinks=True),
    Sdpa(3, 3, 72, 72, q_len=2, dtype="float16", mask="additive", window=100),
    Sdpa(8, 2, 96, 96, dtype="float32", causal=True, q_len=3),
    Sdpa(16, 2, 256, 256, q_len=2, causal=True),
    Sdpa(16, 16, 192, 128),
    Sdpa(16, 1, 576, 512),
    Sdpa(32, 8, 128, 128, k_bits=8, v_bits=8),
    Sdpa(32, 8, 128, 128, 4, 2, k_bits=4, v_bits=4, k_group=32, dtype="float16"),
    Sdpa(8, 8, 64, 64, k_bits=4, v_bits=16, dtype="float32", mask="bool"),
    Sdpa(9, 3, 96, 96, k_bits=16, v_bits=8, v_group=32),
    Sdpa(16, 1, 576, 512, q_len=2, k_bits=4, v_bits=8, lens=True),
    Sdpa(8, 2, 64, 64, 2, 2, causal=True, lens=True, dtype="float32", joint=True),
    Sdpa(
        32, 8, 96, 96, 1, 2, k_bits=8, v_bits=8, **GROUPS_OF_32, lens=True, joint=True
    ),
    Sdpa(32, 8, 128, 128, k_bits=8, v_bits=8, lens=True, joint=True),
)

# Float32 on matrix units, which no plan has: what is right may still ask for it.
WIDE = (
    Sdpa(8, 2, 64, 64, k_bits=8, v_bits=4, **GROUPS_OF_32, dtype="float32"),
    Sdpa(8, 2, 112, 112, dtype="float32"),
    Sdpa(
        *(8, 2, 128, 128),
        **dict(k_bits=4, v_bits=4, lens=True, joint=True, dtype="float32"),
    ),
)


def rows(chips: tuple[str, ...]) -> list[tuple[Sdpa, SdpaPlan, bool]]:
    """(problem, plan, whether it has one chunk)."""
    found = [
        (p, plan_sdpa(p, lookup(chips[i % len(chips)])), i % 3 == 2)
        for i, p in enumerate(PROBLEMS)
    ]
    found += [(p, plan, True) for p, plan, _ in found if packs(p)]
    return found + [(p, on_matrix(p), False) for p in WIDE]


def on_matrix(problem: Sdpa) -> SdpaPlan:
    """The plan of the matrix variant that no chip has for ``problem``."""
    plan = plan_sdpa(problem, lookup("h200"))
    kernel = plan.kernel.replace("split", "matrix")
    return replace(plan, kernel=kernel, keys=16, rows=8, chunk=64)


def row_name(row: tuple[Sdpa, SdpaPlan, bool]) -> str:
    """Short name for test ids."""
    p, chosen, direct = row
    form = f"{p.head_dim}-{p.v_head_dim}-k{p.k_bits}-v{p.v_bits}-{p.dtype}"
    return f"{chosen.kernel}-{form}-{p.mask}-R{chosen.rows}" + "-direct" * direct


def arguments(problem: Sdpa, p: SdpaPlan, direct: bool, narrow: bool = False) -> tuple:
    """(name, inputs, outputs, body, header, template) as the launcher passes them."""
    fold = 1 if direct else p.fold
    values = template(problem, p, direct, packed=direct and packs(problem), fold=fold)
    return *arguments_of(p.kernel, problem, direct, narrow), values


def packs(problem: Sdpa) -> bool:
    """Whether q may have the fresh keys behind it; here it has in rows of one chunk."""
    return problem.joint and min(problem.k_bits, problem.v_bits) >= 16


def arguments_of(kernel: str, problem: Sdpa, direct: bool, narrow: bool) -> tuple:
    """The same without the template."""
    without = ()
    if problem.joint:
        without = ("fresh",) * (direct and packs(problem))
        without += ("sinks",) * (not problem.sinks) + ("ml",) * direct
    text = source.load(kernel, narrow, False, without)
    metal = METAL_TYPES[problem.dtype]
    codes = {bits: metal if bits >= 16 else "uint32_t" for bits in (4, 8, 16, 32)}
    joint = ("kv", "recent", "fresh", "kept")
    names = ("q", "ks", "kb", "vs", "vb", *[f"{n}_{x}" for n in joint for x in "sb"])
    types = dict.fromkeys(names, metal)
    types |= {"k": codes[problem.k_bits], "v": codes[problem.v_bits]}
    types |= dict.fromkeys(joint, codes[problem.k_bits])
    types |= {"mask": {"bool": "bool", "additive": metal}.get(problem.mask, "float")}
    inputs = []
    for name in text.input_names:
        small = name in ("lens", "numbers", "sinks") or (
            name == "mask" and problem.mask == "none"
        )
        kind = types.get(name, "int" if name == "lens" and problem.lens else "float")
        inputs.append(Arg(name, kind, 1 if small else 4, 1 if small else 4096))
    sizes = {
        "out": (metal if direct else "float", 4 if direct else 5, 4096),
        "ml": ("float", 1 if direct else 5, 1 if direct else 4096),
    }
    outputs = [
        Arg(name, *sizes.get(name, (types.get(name), 4, 4096)))
        for name in text.output_names
    ]
    return text.name, inputs, outputs, text.body, text.header


def reduce_arguments(problem: Sdpa, chunks: int = 33, fold: int = 1) -> tuple:
    """The same of the kernel that merges so many chunks, in runs of ``fold``."""
    text = source.load("sdpa_reduce", without=("sinks",) * (not problem.sinks))
    metal = METAL_TYPES[problem.dtype]
    # One head and two chunks: so few are in the constant address space.
    inputs = [Arg("o", "float", 5, 4096), Arg("ml", "float", 5, 4)]
    inputs += [Arg("sinks", metal, 1, problem.q_heads)] * problem.sinks
    outputs = [Arg("out", metal, 4, 4096)]
    values = reduce_launch(problem, 8, chunks, fold=fold)["template"]
    return text.name, inputs, outputs, text.body, text.header, values
