"""Our kernels and MLX's under every check: the sanitizer has nothing to say.

The shapes reach every weight format, every row of the plans' tables and all tails.
"""

from itertools import cycle

import cases
import codes_rows
import fused_case
import gather_rows
import mlx.core as mx
import mlx_headers
import prefill_rows
import pytest
import sdpa_case
import test_mlx_attention as mlx_attention
import test_mlx_quantized as mlx_quantized
import tolerance

from mlx_phase import source
from mlx_phase.executor import SanitizerError
from mlx_phase.launch import fused, matmul, matrix
from mlx_phase.plan import Plan
from mlx_phase.plan_attention import SdpaPlan
from mlx_phase.problem import Matmul

#: (simdgroups, k_simdgroups, splits): what the plan's ladder can choose.
TILES = ((2, 1, 1), (2, 2, 1), (4, 4, 1), (8, 8, 1), (4, 2, 2), (2, 1, 3), (2, 1, 7))
#: M -> rows of a simdgroup, both ends of each row of the plan's table.
ROWS = ((1, 4), (4, 4), (5, 2), (8, 2), (9, 1), (16, 1))
PLAIN = ("none", 16, 64)
#: The same of the sums of lean.h: x shared in one slice and in two, and not.
LEAN = (
    *((8, 1, 1, 8, 4), (2, 1, 1, 1, 4), (8, 2, 2, 3, 4), (8, 1, 3, 9, 2)),
    *((4, 1, 7, 4, 4), (8, 2, 1, 8, 4), (8, 8, 1, 5, 2)),
)
FORMS = [*cases.FORMATS[::2], PLAIN, PLAIN, PLAIN]
QMV = [
    (form, dtype, tile, rows, False)
    for form, dtype, tile, rows in zip(
        FORMS, cycle(cases.DTYPES), cycle(TILES), cycle(ROWS), strict=False
    )
]
QMV += [
    (form, dtype, tile[:3], tile[3:], True)
    for form, dtype, tile in zip(
        cases.FORMATS[1::2], cycle(cases.DTYPES), cycle(LEAN), strict=False
    )
]


@pytest.fixture(autouse=True)
def checked(monkeypatch):
    monkeypatch.setenv("MLX_PHASE_EXECUTOR", "cpu")
    monkeypatch.setenv("MLX_PHASE_SANITIZE", "mem,race,init,sync")


def name_of(row) -> str:
    words = (*row[0], row[1], *row[2], "M", row[3][0])
    return "-".join(map(str, words)) + "-lean" * row[4]


#: What the tests below launch; a new kernel needs a case here.
KERNELS = {"qmv", "qmv_fp", "gemv", "qmv_reduce", "qmv_pair", "qmv_triple", "qmv_add"}
KERNELS |= {"qmv_glu", "qmv_qkv", "qmv_qkv_bias", "qk_norm", "qmm_small"}
KERNELS |= {"add_norm"}
KERNELS |= {"qmm_small_fp", "sdpa_split", "sdpa_split_codes", "sdpa_reduce"}
KERNELS |= {"sdpa_matrix", "sdpa_matrix_codes"}
KERNELS |= {"sdpa_split_joint", "sdpa_matrix_joint"}  # in test_sdpa_joint.py
KERNELS |= {"sdpa_split_codes_joint", "sdpa_matrix_codes_joint"}
KERNELS |= prefill_rows.KERNELS  # in test_prefill_sanitize.py
# In test_qmm_sanitize.py.
KERNELS |= {"qmm", "qmm_fp", "qmm_plain", "qmm_add", "qmm_glu"}
KERNELS |= gather_rows.KERNELS  # in test_gather_kernels.py
KERNELS |= codes_rows.KERNELS  # in test_codes_sanitize.py


def test_every_kernel_has_a_case():
    assert set(source.KERNELS) <= KERNELS


@pytest.mark.parametrize("row", QMV, ids=name_of)
def test_qmv(row):
    """N = 21 ends inside a tile; K ends inside a block and leaves splits empty."""
    (mode, bits, group), dtype, (simdgroups, ks, splits), (M, rows), lean = row
    N, K = 21, 11 * group
    q = None if mode == "none" else cases.random_weights(N, K, mode, bits, group, dtype)
    kernel = {"none": "gemv", "affine": "qmv"}.get(mode, "qmv_fp")
    p = Plan(kernel, rows, simdgroups, ks, splits, True, "test", lean=lean)
    weights = [cases.activations(N, K, dtype, 7)]
    if q is not None:
        weights = [a for a in q.args if a is not None]
    problem = Matmul(M, N, K, dtype, bits, group, mode)
    y = matmul.prepare(problem, p)(cases.activations(M, K, dtype), *weights)
    assert y.shape == (M, N)


@pytest.mark.parametrize("M, N", [(1, 1), (3, 4), (2, 67)])
def test_qmv_as_planned(M, N):
    """Fewer rows than a tile has, one tile, many; 2 groups of K."""
    q = cases.random_weights(N, 128, "affine", 4, 64, "bfloat16")
    x = cases.activations(M, 128, "bfloat16")
    assert matmul.quantized_matvec(x, *q.args).shape == (M, N)


def test_text_without_vector_loads_takes_any_address():
    """It serves where 16-byte loads must be aligned; the other text has such loads."""
    q = cases.random_weights(12, 192, "affine", 4, 64, "float16")
    x = cases.activations(4, 193, "float16").flatten()[1:769].reshape(4, 192)
    w = mx.concatenate([q.w.flatten(), q.w[0, :1]])[1:].reshape(q.w.shape)
    before = matmul.narrow_loads(True)
    try:
        y = matmul.quantized_matvec(x, w, q.scales, q.biases)
    finally:
        matmul.narrow_loads(before)
    assert y.shape == (4, 12)
    with pytest.raises(SanitizerError, match="misaligned access to const uint4"):
        matmul.quantized_matvec(x, w, q.scales, q.biases)


@pytest.mark.parametrize("Ns", [(24, 8), (12, 4, 20)])
def test_shared_launches(Ns):
    members = tuple(Matmul(2, N, 192, "float16") for N in Ns)
    qs = [cases.random_weights(N, 192, dtype="float16") for N in Ns]
    run = matmul.prepare_shared(members)
    ys = run(cases.activations(2, 192, "float16"), *(a for q in qs for a in q.args))
    assert [y.shape for y in ys] == [(2, N) for N in Ns]


@pytest.mark.parametrize(
    "form, M, dtype, rows, ks",
    [
        (("affine", 4, 64), 6, "bfloat16", 16, 2),
        (("affine", 3, 32), 16, "float16", 32, 4),
        (("mxfp4", 4, 32), 9, "float32", 16, 2),
    ],
)
def test_small_m_on_matrices(form, M, dtype, rows, ks):
    mode, bits, group = form
    N, K = 37, 5 * group
    q = cases.random_weights(N, K, mode, bits, group, dtype)
    kernel = "qmm_small" if mode == "affine" else "qmm_small_fp"
    p = Plan(kernel, rows, ks, ks, 1, False, "test")
    run = matrix.prepare(Matmul(M, N, K, dtype, bits, group, mode), p)
    y = run(cases.activations(M, K, dtype), *(a for a in q.args if a is not None))
    assert y.shape == (M, N)


def test_fused_add_and_glu():
    dtype, M, K = "bfloat16", 3, 320
    qs = [fused_case.weights(36, K, dtype, seed=s) for s in (0, 1)]
    x, res = cases.activations(M, K, dtype), cases.activations(M, 36, dtype)
    problem = Matmul(M, 36, K, dtype)
    assert fused.prepare_add(problem)(x, *qs[0].args, res).shape == (M, 36)
    glu = fused.prepare_glu(problem, "silu", fused_case.EPS)
    norm = fused_case.vector(K, dtype, 2)
    assert glu(x, norm, *qs[0].args, *qs[1].args).shape == (M, 36)
    # K ends inside a run of threads.
    run = fused.prepare_add_norm(dtype, K - 20, fused_case.EPS)
    x, res = (cases.activations(M, K - 20, dtype, seed=s) for s in (1, 2))
    assert run(x, fused_case.vector(K - 20, dtype, 2), res).shape == (M, K - 20)


@pytest.mark.parametrize("bias", [False, True])
def test_fused_qkv(bias):
    dtype, D, K, L = "float16", 32, 192, 3
    sizes, rotary = (2 * D, D, D), fused.Rotary(D, 16, False)
    qs = [fused_case.weights(n, K, dtype, seed=n) for n in sizes]
    members = tuple(Matmul(L, n, K, dtype) for n in sizes)
    angles = mx.array(fused_case.angles(L, 7, D, 16, False), mx.float32)
    biases = [fused_case.vector(n, dtype, n) for n in sizes] if bias else []
    run = fused.prepare_qkv(members, rotary, fused_case.EPS, bias)
    x = cases.activations(L, K, dtype).reshape(1, L, K)
    arrays = [a for q in qs for a in q.args]
    q, kv = run(x, fused_case.vector(K, dtype, 5), *arrays, *biases, angles)
    norms = [fused_case.vector(D, dtype, s) for s in (1, 2)]
    normed = fused.prepare_qk_norm(dtype, rotary, fused_case.EPS)(q, kv, *norms, angles)
    assert [a.shape for a in normed] == [(1, 2, L, D), (2, 1, L, D)]


MASK = mx.random.uniform(shape=(1, 4, 3, 70), key=mx.random.key(0)) < 0.7
SDPA = {
    "one_chunk": dict(k_len=31),
    "masks": dict(
        q_len=3, causal=True, window=40, sinks=True, mask=MASK, dtype="float32"
    ),
    "codes_and_lens": dict(
        k_bits=8, v_bits=4, v_group=32, dims=(128, 64), heads=(8, 1), q_len=2, batch=2,
        lens=(5, 50), causal=True,
    ),
    "uneven_head": dict(dims=(72, 72), q_len=2, k_len=49, batch=2, dtype="float16"),
}  # fmt: skip


@pytest.mark.parametrize("name", SDPA)
def test_sdpa(name, monkeypatch):
    """Caches are slices of longer ones: what lies between must not be read."""
    # Chunks past the keys, and the states of a single chunk, stay unwritten.
    monkeypatch.setenv("MLX_PHASE_SANITIZE", "all,partial")
    call = sdpa_case.case(**SDPA[name])
    caches = call.caches()
    if isinstance(caches[0], mx.array):
        room = [(0, 0), (0, 0), (0, 20), (0, 0)]
        caches = [mx.pad(a, room)[:, :, : a.shape[2]] for a in caches]
    plan = sdpa_case.small_plan(call.problem)
    tolerance.assert_close(call.run(plan, caches), *call.oracle(), call.problem.dtype)
    if name == "uneven_head":
        return  # matrices take whole tiles of a head
    coded = name == "codes_and_lens"
    kernel = "sdpa_matrix_codes" if coded else "sdpa_matrix"
    plan = SdpaPlan(kernel, 64, 4, 32 if coded else 16, 2, 8, True, "test")
    tolerance.assert_close(call.run(plan, caches), *call.oracle(), call.problem.dtype)


@pytest.mark.parametrize(
    ("kernel", "parameters", "shape", "tiles"),
    [
        ("affine_qmv_fast", "64, 4, false, true", (2, 13, 512), (2, 2)),
        # overlapping tiles write the same values twice: no race
        ("affine_qmv", "64, 4, false", (2, 67, 576), (2, 9)),
        ("affine_qmv_wide", "64, 4, 3, 8, false", (3, 67, 320), (1, 9)),
        ("affine_qmv_quad", "64, 4, 128, false", (2, 64, 128), (2, 1)),
        ("affine_qmm_t", "64, 4, false, false", (33, 35, 128), (2, 2)),
    ],
)
def test_mlx_quantized(kernel, parameters, shape, tiles):
    mlx_quantized.check(kernel, parameters, shape, "float16", 4, 64, tiles)


def test_mlx_reads_scales_past_the_last_row():
    """MLX 0.32: rows of a tile beyond N load a scale and a bias before they look."""
    with pytest.raises(SanitizerError, match=r"scales\[144\].*scales\[0\] to") as found:
        mlx_quantized.check(
            "affine_qmv_quad", "64, 4, 128, false", (2, 70, 128), "float16", 4, 64,
            (2, 2),
        )  # fmt: skip
    assert found.value.check == "mem" and found.value.buffer == "scales"


@pytest.mark.parametrize("route", ["one_pass", "two_pass"])
def test_mlx_attention(route):
    problem = mlx_attention.Problem((1, 2, 1, 2, 70, 64), "bfloat16", "causal", True)
    problem.check(getattr(mlx_attention, route)(problem))


def test_mlx_softmax():
    x = mx.random.normal((3, 130), key=mx.random.key(1)).astype(mx.float16)
    text = "#define SOFTMAX_N_READS 4\n" + mlx_headers.header("softmax.h")
    (out,) = mlx_attention.run(
        "softmax", mlx_attention.row_reduction("softmax_single_row"), text,
        {"x": x, "N": 130}, [(x.shape, x.dtype)], (3, 1, 1), (64, 1, 1), x.dtype,
    )  # fmt: skip
    assert mx.allclose(out.sum(-1), mx.ones(3), atol=1e-2)
