"""Which product takes the prefill kernels, with which tile; how layers get there."""

from dataclasses import replace

import cases
import mlx.core as mx
import numpy as np
import pytest
import ref
import tolerance
from tune_world import quantized

import mlx_phase
from mlx_phase import check, doctor, doctor_kernels, ops, source
from mlx_phase.chip import CHIPS, detect, lookup
from mlx_phase.executor import ExecutorError
from mlx_phase.launch import matmul
from mlx_phase.plan import MIN_SPLIT_K
from mlx_phase.plan_qmm import bucket, plan_qmm, stays_stock
from mlx_phase.problem import FP_MODES, Matmul

ROWS = (17, 33, 100, 512, 4096)
FORMS = [(4, 64, "affine"), (3, 32, "affine"), (*FP_MODES["nvfp4"], "nvfp4")]


@pytest.fixture(autouse=True)
def clean_results():
    check.forget()
    yield
    check.forget()


@pytest.mark.parametrize("chip", CHIPS, ids=lambda c: f"{c.key}-{c.bandwidth_gbs}")
def test_every_tile_fits_the_chip(chip):
    for M in ROWS:
        for N, K in [(8, 1024), (128256, 4096), (4096, 14336)]:
            for bits, group, mode in [*FORMS, (16, 0, "none")]:
                for dtype in cases.DTYPES:
                    p = Matmul(M, N, K, dtype, bits, group, mode)
                    if dtype == "float32" and chip.arch.startswith("sm_"):
                        assert "tensor cores" in stays_stock(p, chip)
                        continue
                    check_tile(p, plan_qmm(p, chip))


def check_tile(p: Matmul, plan) -> None:
    t, size = plan.tile, 4 if p.x_dtype == "float32" else 2
    threads = 32 * t.SM * t.SN
    assert 32 * plan.simdgroups == threads <= 256
    assert 2 * (t.BM + t.BN) * t.BK * size <= 32 * 1024, plan
    # A simdgroup has 16 rows of x and 16 of W at least; threads share the loads.
    assert t.BM % (16 * t.SM) == t.BN % (16 * t.SN) == t.BK % 32 == 0, plan
    assert t.BM * t.BK % (8 * threads) == t.BN * t.BK % (16 * threads) == 0, plan
    for rows in (t.BM, t.BN // 2):
        assert 4 * rows % threads == 0 or threads % (4 * rows) == 0, plan
    # Sums of a lane: 128 on tensor cores' chips, 32 where registers are fewer.
    assert t.BM * t.BN // threads <= 128
    assert plan.splits == 1 or p.K // plan.splits >= MIN_SPLIT_K
    assert not plan.exact


def test_the_grid_is_filled_by_shares_of_k():
    h200 = lookup("h200")
    assert plan_qmm(Matmul(32, 1024, 4096), h200).splits > 1
    assert plan_qmm(Matmul(2048, 14336, 4096), h200).splits == 1
    assert plan_qmm(Matmul(32, 1024, 512), h200).splits == 1


def test_neural_accelerators_keep_stock():
    for chip in CHIPS:
        why = stays_stock(Matmul(512, 4096, 4096), chip)
        if chip.name.startswith(("M5", "M6")):
            assert "neural accelerators" in why
        elif chip.name[0] == "M" and chip.device_class != "amd":
            assert why is None


def test_prompts_are_stock_where_it_is_not_beaten():
    problem, h200 = Matmul(17, 4096, 4096), lookup("h200")
    assert stays_stock(problem, h200) is None
    half = {"x_dtype": "float16"}
    mxfp4 = {"mode": "mxfp4", "group_size": 32}
    for change in ({"bits": 5}, {**half, "bits": 3}, half | mxfp4):
        assert "not timed" in stays_stock(replace(problem, **change), h200)
    # Few rows of many weights of 8 bits, and a middle number of rows of few weights.
    for bits, size, served in (
        *((4, 2048, (256, 2048)), (8, 2048, (256, 2048))),
        *((4, 4096, (256, 512, 1024, 2048)), (8, 4096, (512, 1024, 2048))),
    ):
        for M in (256, 512, 1024, 2048):
            why = stays_stock(Matmul(M, size, 2048, bits=bits), h200)
            assert (why is None) == (M in served)
            assert why is None or why.startswith(f"stock is as fast for M = {M} ")
    # Timed forms: more rows than these are ours, on matrices that are not small.
    for change, most in (
        ({"bits": 3}, 64),
        ({"bits": 6}, 0),
        ({"bits": 8, "mode": "mxfp8", "group_size": 32}, 32),
        ({"mode": "nvfp4", "group_size": 16}, 0),
        (half, 64),
        ({**half, "bits": 8}, 256),
    ):
        for M in (32, 64, 128, 256, 512, 2048):
            timed = replace(problem, M=M, **change)
            assert (stays_stock(timed, h200) is None) == (M > most)
            assert "as fast" in stays_stock(replace(timed, N=2048, K=2048), h200)
    newer = {"device_name": "Apple M9", "architecture": "applegpu_g30g"}
    other = {"device_name": "NVIDIA RTX", "architecture": "sm_120"}
    for chip in (lookup("a100-80gb"), detect(newer), detect(other)):
        assert "nothing says that stock is beaten" in stays_stock(problem, chip)


def test_plain_weights_are_stock_on_a_gpu():
    plain = Matmul(512, 4096, 4096, mode="none")
    for name in ("h200", "m1", "m4-max"):
        assert "plain weights" in stays_stock(plain, lookup(name))
    assert stays_stock(plain, lookup("cpu")) is None


def test_one_route_for_all_rows_of_a_plan():
    assert [bucket(m) for m in (17, 32, 33, 512, 513, 9999)] == [
        *(32, 32, 64, 512, 1024, 4096)
    ]
    problem = Matmul(40, 96, 128, "float32")
    one, two = (ops.kernel_route(replace(problem, M=m)) for m in (40, 64))
    assert one is two and one.name.startswith("qmm ")
    assert ops.kernel_route(replace(problem, M=65)) is not one
    # Several matrices do not share a prefill launch.
    both = ops.kernel_route(problem, replace(problem, N=32))
    assert both.launch is None and "M = 40" in both.reason


def test_a_patched_layer_serves_prompts_and_decode():
    layer = quantized()
    weight = ref.dequantize(layer.weight, layer.scales, layer.biases, 64, 4, "affine")
    mlx_phase.patch(layer)
    for m in (1, 17, 50):
        x = cases.activations(m, 128)
        ops.reset_served()
        y = layer(x.reshape(1, m, 128))
        assert y.shape == (1, m, 96) and not ops.served().stock
        (name,) = ops.served().kernels
        assert name.startswith("qmv " if m == 1 else "qmm ")
        dense = ref.dense(x, weight, "float32")
        tolerance.assert_close(y[0], ref.matmul(x, weight), dense, "float32")
    # Checked on first use, with rows that end inside a tile.
    (result,) = [r for r in check.results() if r.kernel.startswith("qmm ")]
    assert result.ok and 0 < result.worst < 1
    # Chunks of a prompt and the whole of it.
    x = cases.activations(50, 128)
    parts = mx.concatenate([layer(x[:20]), layer(x[20:37]), layer(x[37:])])
    assert np.abs(np.array(parts - layer(x))).max() < 1e-5


def test_stock_serves_where_the_kernel_fails_its_check(monkeypatch):
    real = check.prepare

    def broken(problem, chosen):
        if chosen.kernel == "qmm":
            raise ExecutorError("planted: no matrix units")
        return real(problem, chosen)

    monkeypatch.setattr(check, "prepare", broken)
    layer, x = quantized(), cases.activations(40, 128)
    want = np.array(layer(x))
    mlx_phase.patch(layer)
    assert np.array_equal(np.array(layer(x)), want)
    (why,) = ops.served().stock
    assert "planted" in why
    assert layer(x[:3]).shape == (3, 96) and "qmv" in str(ops.served().kernels)


def test_a_check_sees_a_wrong_result(monkeypatch):
    real = check.prepare

    def wrong(problem, chosen):
        run = real(problem, chosen)
        return lambda x, *w: run(x, *w) * 1.01

    monkeypatch.setattr(check, "prepare", wrong)
    problem = Matmul(40, 96, 128, "float32")
    chosen = plan_qmm(problem, matmul.device_chip())
    assert "wrong result" in check.check(problem, chosen=chosen).error
    ops.enable_all()


@pytest.mark.parametrize("quick", [True, False])
def test_the_doctor_has_a_row_for_each_format(quick):
    found = doctor_kernels.prefill_rows(quick)
    kernels = {r.plan_many.kernel for r in found}
    assert kernels == {"qmm", "qmm_plain"} | ({"qmm_fp"} if not quick else set())
    assert len(found) == (2 if quick else 66)
    assert not set(found) - set(doctor.everything(quick))


def test_the_doctor_checks_and_times_a_tile():
    row = doctor_kernels.prefill_rows(True)[0]
    found = doctor_kernels.examine(row)
    assert found.ok and found.exact is None and found.run_ms > 0
    assert found.kernel.startswith("qmm affine") and found.M == 4096


def test_readme_has_the_threadgroups_of_every_apple_chip():
    text = (source.metal_dir() / "README.md").read_text()
    table = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in text.split("\n")
        if line.startswith(("| cores |", "| M = 64, ", "| M = 512 |", "| M = 2048 |"))
    ]
    shown = {
        int(cores): own for cores, *own in zip(*table, strict=True) if cores != "cores"
    }
    apple = [c for c in CHIPS if c.family.startswith("Apple")]
    assert shown.keys() == {c.gpu_cores for c in apple}
    for c in apple:
        for M, have in zip((64, 512, 2048), shown[c.gpu_cores], strict=True):
            p = plan_qmm(Matmul(M, 4096, 4096), c)
            tiles = -(-M // p.tile.BM) * -(-4096 // p.tile.BN) * p.splits
            assert float(have) == pytest.approx(tiles / c.gpu_cores, rel=0.04)
