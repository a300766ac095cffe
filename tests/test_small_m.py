"""Which kernel serves each M: exact rows for those who ask, matrix units for others."""

import copy
from dataclasses import replace

import cases
import mlx.core as mx
import mlx.nn as nn
import pytest
import ref
import tolerance
from mlx_lm.models.cache import make_prompt_cache
from test_traced import TOKENS, model
from tune_world import at, entry, plans, quantized

import mlx_phase
from mlx_phase import check, doctor, doctor_kernels, ops
from mlx_phase.chip import CHIPS, lookup
from mlx_phase.executor import ExecutorError
from mlx_phase.launch import decode, matmul
from mlx_phase.plan import MAX_M, Plan, plan
from mlx_phase.plan_exact import on_codes
from mlx_phase.plan_matrix import first_rows, on_matrix, plan_matrix
from mlx_phase.problem import FP_MODES, Matmul

ROWS = range(1, MAX_M + 1)
X = cases.activations(MAX_M, 128)
FIRST = first_rows(Matmul(1, 96, 128), matmul.device_chip())


@pytest.fixture(autouse=True)
def clean_results():
    check.forget()
    yield
    check.forget()


def kernel_names() -> set[str]:
    return {name.split()[0] for name in ops.served().kernels}


def calls(layer, m: int) -> tuple[mx.array, set[str]]:
    """Result for the first m rows of X, and the kernels that served it."""
    ops.reset_served()
    y = layer(X[:m])
    mx.eval(y)
    assert not ops.served().stock
    return y, kernel_names()


@pytest.mark.parametrize("chip", CHIPS, ids=lambda c: f"{c.key}-{c.bandwidth_gbs}")
def test_the_choice_is_exact_below_a_threshold_and_matrix_units_from_it_on(
    chip, monkeypatch
):
    monkeypatch.setattr(ops, "device_chip", lambda: chip)
    forms = [(4, 64, "affine"), (3, 32, "affine"), (*FP_MODES["nvfp4"], "nvfp4")]
    for dtype in cases.DTYPES:
        for N, K in [(8, 1024), (4096, 4096), (128256, 4096)]:
            for bits, group, mode in forms:
                problems = [Matmul(M, N, K, dtype, bits, group, mode) for M in ROWS]
                exact = [ops.choose((p,)) for p in problems]
                fast = [ops.choose((p,), exact=False) for p in problems]
                if on_codes(problems[0], chip):
                    assert {p.kernel for p in exact} == {"qmm_codes"}
                    assert fast == exact
                    continue
                assert all(p.exact and p.kernel.startswith("qmv") for p in exact)
                first = first_rows(problems[0], chip)
                tensor_cores = chip.arch.startswith("sm_")
                least = 4 if chip.family == "Hopper" else 6
                assert first == (17 if tensor_cores and dtype == "float32" else least)
                assert fast[: first - 1] == exact[: first - 1]
                assert all(p.kernel.startswith("qmm_small") for p in fast[first - 1 :])
                # The same tile up to 8 columns, and up to 16: no cost of its own per M.
                tiles = {(p.rows, p.k_simdgroups, p.splits) for p in fast[first - 1 :]}
                assert len(tiles) <= 1
                # Rows of a tile fall with M, never below those of the next larger tile.
                rows = [p.rows for p in exact]
                assert rows == sorted(rows, reverse=True)


@pytest.mark.parametrize(
    "problem",
    [
        Matmul(16, 64, 64, mode="none"),
        Matmul(16, 4, 64),
        Matmul(17, 4096, 4096),
        Matmul(5, 4096, 4096),
        Matmul(16, 4096, 4096, "float32"),
    ],
)
def test_what_never_goes_to_matrix_units(problem):
    assert not on_matrix(problem, lookup("h200"))


def test_the_plan_is_printed_when_asked(capsys, monkeypatch):
    monkeypatch.setenv("MLX_PHASE_PRINT_PLANS", "1")
    plan_matrix.cache_clear()
    plan_matrix(Matmul(8, 4096, 8192), lookup("h200"))
    assert "M=8 N=4096 K=8192 affine 4-bit g64 bfloat16 -> qmm_small rows=16" in (
        capsys.readouterr().err
    )


def plan_rows() -> dict[tuple[int, int], set[tuple[int, int, int]]]:
    """(k_simdgroups, splits) -> (largest M, rows, simdgroups), over the chip table."""
    found: dict[tuple[int, int], dict[tuple[int, int], int]] = {}
    for chip in CHIPS:
        for N in (1, 8, 64, 1000, 4096, 128256):
            for K in (128, 1024, 4096, 14336, 53248):
                for M in ROWS:
                    p = plan(Matmul(M, N, K), chip)
                    tiles = found.setdefault((p.k_simdgroups, p.splits), {})
                    tile = p.rows, p.simdgroups
                    tiles[tile] = max(M, tiles.get(tile, 0))
    return {s: {(m, *tile) for tile, m in tiles.items()} for s, tiles in found.items()}


PLANS = plan_rows()


@pytest.mark.parametrize("split", sorted(PLANS), ids=str)
def test_every_row_of_the_plan_gives_the_bits_of_a_single_row(split):
    # K that leaves packs over, and shares of K empty where there are many.
    N, K = 13, 1088
    q = cases.random_weights(N, K, "affine", 4, 64, "bfloat16")
    x = cases.activations(MAX_M, K, "bfloat16")
    tiles = sorted(PLANS[split])
    assert {m for m, *_ in tiles} == {4, 8, 16}

    def run(M: int, rows: int, simdgroups: int) -> mx.array:
        chosen = Plan("qmv", rows, simdgroups, *split, True, "test")
        return decode.prepare(Matmul(M, N, K, "bfloat16"), chosen)(x[:M], *q.args)

    *outs, wide = (run(*tile) for tile in tiles)
    weight = ref.dequantize(*q.args, 64, 4, "affine")
    dense = ref.dense(x, weight, "bfloat16")
    tolerance.assert_close(wide, ref.matmul(x, weight), dense, "bfloat16")
    for out in (run(1, *tiles[0][1:]), *outs):
        tolerance.assert_bits(out, wide[: len(out)])


def test_two_models_keep_what_they_were_patched_with():
    exact, fast = quantized(), quantized()
    mlx_phase.patch(exact)
    report = mlx_phase.patch(fast, exact=False)
    assert any("1 layers go to matrix units from M = 6" in n for n in report.notes)
    assert "exact rows: not asked for" in str(report)
    arrays = (fast[name] for name in ("weight", "scales", "biases"))
    weight = ref.dequantize(*arrays, 64, 4, "affine")
    for m in (1, FIRST - 1, FIRST, 16):
        y, names = calls(exact, m)
        assert names == {"qmv"}
        tolerance.assert_bits(y[:1], exact(X[:1]))
        z, names = calls(fast, m)
        assert names == ({"qmv"} if m < FIRST else {"qmm_small"})
        dense = ref.dense(X[:m], weight, "float32")
        tolerance.assert_close(z, ref.matmul(X[:m], weight), dense, "float32")
    # Checked on first use, like every kernel; a stranger's patch changes nothing.
    assert any(r.kernel.startswith("qmm_small") for r in check.results())
    mlx_phase.patch(quantized())
    assert calls(fast, 8)[1] == {"qmm_small"} and calls(exact, 8)[1] == {"qmv"}


def test_a_later_patch_and_a_block_change_it_and_copies_keep_it():
    layer = quantized()
    mlx_phase.patch(layer, check=False, exact=False)
    twin = copy.deepcopy(layer)
    assert calls(twin, 8)[1] == calls(layer, 8)[1] == {"qmm_small"}
    with mlx_phase.patched(layer, check=False):
        assert calls(layer, 8)[1] == {"qmv"}
    assert calls(layer, 8)[1] == {"qmm_small"}
    mlx_phase.patch(layer, check=False)
    assert calls(layer, 8)[1] == {"qmv"} and calls(twin, 8)[1] == {"qmm_small"}
    mlx_phase.patch(layer, check=False, exact=False)
    mlx_phase.unpatch(layer)
    mlx_phase.patch(layer, check=False)
    assert calls(layer, 8)[1] == {"qmv"}


def test_a_whole_model_uses_them_for_verification_and_comes_back():
    m = model("llama", mx.bfloat16)
    stock = m(TOKENS[:, :16])
    for exact in (False, True):
        mlx_phase.patch(m, check=False, exact=exact)
        caches = make_prompt_cache(m)
        m(TOKENS[:, :1], cache=caches)
        ops.reset_served()
        few = m(TOKENS[:, 1:6], cache=caches)
        mx.eval(few)
        # Up to five rows: fused launches and shared ones, whatever was asked for.
        assert {"qmv_qkv", "qmv_glu", "qmv_add"} <= kernel_names()
        ops.reset_served()
        many = m(TOKENS[:, 6:16], cache=caches)
        mx.eval(many)
        names = {n for n in kernel_names() if not n.startswith("sdpa")}
        assert not ops.served().stock
        if exact:
            assert {"qmv_qkv", "qmv_glu"} <= names and "qmm_small" not in names
        else:
            assert names == {"qmm_small"}
        logits = mx.concatenate([few, many], axis=1).astype(mx.float32)
        want = stock[:, 1:].astype(mx.float32)
        off = mx.linalg.norm(logits - want) / mx.linalg.norm(want)
        assert off.item() < 0.05


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        for i, name in enumerate(("gate_proj", "up_proj")):
            mx.random.seed(i)
            dense = nn.Linear(128, 96, bias=False)
            setattr(self, name, nn.QuantizedLinear.from_linear(dense, 64, 4))

    def __call__(self, x):
        return self.gate_proj(x) * self.up_proj(x)


def test_siblings_share_a_launch_below_and_go_alone_above():
    mlp = Mlp()
    report = mlx_phase.patch(mlp, check=False, exact=False)
    assert report.shared == {"gate_proj + up_proj": 1}
    for m, names in ((2, {"qmv_pair"}), (8, {"qmm_small"}), (8, {"qmm_small"})):
        assert calls(mlp, m)[1] == names
    # Not for good: the next step of one row shares again.
    assert calls(mlp, 1)[1] == {"qmv_pair"}


def test_exact_kernels_serve_where_matrix_units_fail_their_check(monkeypatch):
    real = check.prepare

    def broken(problem, chosen):
        if chosen.kernel == "qmm_small":
            raise ExecutorError("planted: no matrix units")
        return real(problem, chosen)

    monkeypatch.setattr(check, "prepare", broken)
    layer = quantized()
    mlx_phase.patch(layer, exact=False)
    y, names = calls(layer, 8)
    assert names == {"qmv"} and any("qmm_small" in name for name in ops.off())
    tolerance.assert_bits(y[:1], calls(layer, 1)[0])


def test_raced_plans_decide_for_stock_and_leave_the_rest_to_matrix_units():
    one = (Matmul(1, 96, 128, "float32"),)
    eight = at(one, 8)
    won = plans(entry(one, rows=1), entry(eight, rows=1))
    ops.use_plans(won.decide, "won")
    assert ops.choose(eight).rows == 1 and ops.choose(one, exact=False).rows == 1
    assert ops.choose(eight, exact=False).kernel == "qmm_small"
    lost = plans(entry(one, rows=1), entry(eight, winner="stock"))
    ops.use_plans(lost.decide, "lost")
    assert ops.choose(eight).exact
    assert "stock wins: tuned at M = 8" in ops.choose(eight, exact=False)
    ops.use_plans(None)


@pytest.mark.parametrize("quick", [True, False])
def test_the_doctor_has_a_row_for_each_format_and_dtype(quick):
    found = doctor_kernels.matrix_rows(quick)
    assert {r.plan_many.kernel for r in found} == {"qmm_small", "qmm_small_fp"}
    assert [r.many[0].M for r in found] == [16] * (2 if quick else 63)
    assert not set(found) - set(doctor.everything(quick))


def test_the_doctor_checks_and_times_them_without_a_claim_on_bits():
    row = doctor_kernels.matrix_rows(True)[0]
    small = [tuple(replace(p, N=96, K=128) for p in ps) for ps in (row.one, row.many)]
    found = doctor_kernels.examine(replace(row, one=small[0], many=small[1]))
    assert found.ok and found.exact is None and found.run_ms > 0
    assert found.kernel.startswith("qmm_small affine") and found.M == 16
