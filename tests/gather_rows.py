"""Template rows of the experts' kernels, for checks that only compile."""

from mlx_phase import source
from mlx_phase.chip import lookup
from mlx_phase.executor.signature import METAL_TYPES, Arg
from mlx_phase.launch import gather
from mlx_phase.plan_gather import plan_gather
from mlx_phase.problem import Gather, Matmul

#: The kernels that these rows reach.
KERNELS = {"gather_qmv", "gather_qmv_fp", "gather_glu", "gather_glu_fp", "gather_tiles"}
KERNELS |= {"gather_qmm", "gather_qmm_fp", "gather_qmm_glu", "gather_qmm_glu_fp"}


def _of(dtype="bfloat16", form=("affine", 4, 64), pairs=64, E=128, **more) -> Gather:
    mode, bits, group = form
    return Gather(Matmul(1, 768, 2048, dtype, bits, group, mode), E, pairs, **more)


CLIPPED = {"activation": "clipped", "alpha": 1.702, "limit": 7.0}
MXFP4 = ("mxfp4", 4, 32)
# Every dtype, activation, share and choice; formats are those of qmv.
VECTORS = (
    _of(each=8),
    _of("float16", ("affine", 4, 32), sorted=True),
    _of("float32", ("affine", 8, 128), each=0, bias=True),
    _of("float16", ("nvfp4", 4, 16), each=0),
    _of(each=8, activation="silu"),
    _of("float32", ("affine", 6, 32), each=2, activation="gelu_approx", bias=True),
    _of(form=MXFP4, each=4, bias=True, **CLIPPED),
    _of("float16", ("mxfp8", 8, 32), each=4, activation="silu"),
)
# Sorted pairs: few and many for an expert.
TILES = (
    _of(pairs=1024, sorted=True, scattered=True),
    _of("float16", ("affine", 5, 64), 4096, sorted=True, bias=True),
    _of("float32", ("affine", 8, 32), 8192, sorted=True, each=0),
    _of(form=MXFP4, pairs=1 << 15, sorted=True, bias=True),
    _of(pairs=1 << 15, sorted=True, each=0, activation="silu"),
    _of("float16", MXFP4, 4096, 32, sorted=True, each=0, bias=True, **CLIPPED),
    _of("bfloat16", ("nvfp4", 4, 16), 512, sorted=True, each=0, activation="silu"),
)


def rows(chips: tuple[str, ...]) -> list[tuple[Gather, str]]:
    """(problem, chip)."""
    cases = (*VECTORS, *TILES)
    return [(g, chips[i % len(chips)]) for i, g in enumerate(cases)]


def row_name(row: tuple[Gather, str]) -> str:
    """Short name for test ids."""
    return f"{problem_name(row[0])}-{row[1]}"


def problem_name(g: Gather) -> str:
    """Short name for test ids."""
    m = g.matmul
    kind = f"{g.activation or 'plain'}-each{g.each}{'-sorted' * g.sorted}"
    return f"{m.mode}-{m.bits}-{m.group_size}-{m.x_dtype}-{kind}-P{g.pairs}"


def arguments(problem: Gather, chip: str, narrow: bool = False) -> tuple:
    """(name, inputs, outputs, body, header, template) as the launcher passes them."""
    p = plan_gather(problem, lookup(chip))
    text, m = source.load(p.kernel, narrow), problem.matmul
    metal = METAL_TYPES[m.x_dtype]
    scales = metal if m.mode == "affine" else "uint8_t"
    # A bias that is not there is another array: the scales.
    types = {"x": metal, "w": "uint32_t", "s": scales, "b": metal}
    types |= {"c": metal if problem.bias else scales, "tiles": "int32_t"}
    inputs = [Arg(n, types.get(n, types.get(n[0], "uint32_t")), 3, 1 << 20)
              for n in text.input_names]  # fmt: skip
    outputs = [Arg("y", metal, 3, 1 << 16)]
    values = gather.template(problem, p)
    return text.name, inputs, outputs, text.body, text.header, values


def list_arguments(chip: str) -> tuple:
    """The same of the kernel that makes the list of tiles."""
    g = TILES[0]
    text = source.load("gather_tiles")
    inputs, outputs = (
        [Arg("rhs", "uint32_t", 1, 1024)],
        [Arg("tiles", "int32_t", 2, 768)],
    )
    values = gather.list_template(g, plan_gather(g, lookup(chip)))
    return text.name, inputs, outputs, text.body, text.header, values
