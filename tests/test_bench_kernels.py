"""Kernel sweeps: GPU times from fake profiler records, and small real runs."""

import importlib.util
from dataclasses import replace
from functools import partial
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_phase.bench import kernel_suite, record
from mlx_phase.bench.device import Environment
from mlx_phase.bench.gpu_time import Event, ProfileError
from mlx_phase.bench.kernel_data import error_of, link, ours, stock, weights
from mlx_phase.bench.measure import NoiseError
from mlx_phase.chip import lookup
from mlx_phase.plan import supports
from mlx_phase.problem import Matmul

PATH = Path(__file__).parents[1] / "bench" / "kernels.py"
VERSIONS = {"mlx": "1", "mlx_lm": "1", "mlx_phase": "1"}
# A small cache, or rotating these tiny weights would take a minute.
CHIP = replace(lookup("h200"), slc_mb=0.02)
H200 = Environment(CHIP, "NVIDIA H200", "Linux", "cuda", VERSIONS)
SMALL = Matmul(1, 64, 128, "bfloat16", 4, 64)
EFFORT = kernel_suite.Effort(repeats=3, launches=2, chain=(1, 4))
FORMATS = [
    (4, 64, "affine"),
    (3, 32, "affine"),
    (8, 128, "affine"),
    (4, 32, "mxfp4"),
    (8, 32, "mxfp8"),
    (4, 16, "nvfp4"),
    (16, 0, "none"),
]


@pytest.fixture(scope="module")
def sweeps():
    spec = importlib.util.spec_from_file_location("bench_kernels", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Device:
    """A deterministic GPU: each launch moves its clock, and it records kernels."""

    KERNELS = {"ours": ["qmv", "qmv_reduce"], "stock": ["stock_qmv"]}
    US = {"qmv": 0.03, "qmv_reduce": 0.01, "stock_qmv": 0.1}

    def __init__(self, monkeypatch, **us):
        self.us, self.log, self.now = self.US | us, [], 0.0
        for side, make in (("ours", ours), ("stock", stock)):
            patched = self.counted(side, make)
            monkeypatch.setattr(kernel_suite, side, patched)

    def counted(self, side, make):
        def op_of(problem):
            real = make(problem)

            def run(x, *buffers):
                self.log += self.KERNELS[side]
                self.now += 2e-6 * sum(self.us[name] for name in self.KERNELS[side])
                return real(x, *buffers)

            return run

        return op_of

    def clock(self):
        return self.now

    def events(self, fn):
        self.log.clear()
        fn()
        return [Event(n, float(i), self.us[n]) for i, n in enumerate(self.log)]

    def row(self, env=H200, effort=EFFORT, **options):
        options = {"gpu_events": self.events, "clock": self.clock} | options
        return kernel_suite.measure_case(SMALL, env, effort, **options)


@pytest.fixture
def device(monkeypatch):
    return Device(monkeypatch)


def test_gpu_time_of_a_launch_is_the_sum_of_its_kernels(device):
    row = device.row()
    assert row["us"] == pytest.approx(0.04)
    assert row["stock_us"] == pytest.approx(0.1)
    assert row["ratio"] == pytest.approx(2.5)
    assert row["us_source"] == "gpu profiler"
    moved = 64 * 128 // 2 + 64 * 2 * 4 + (64 + 128) * 2
    assert row["gbps"] == pytest.approx(moved / 0.04e-6 / 1e9)
    assert row["frac_peak"] == pytest.approx(row["gbps"] / 4800)
    assert row["wall_us"] == pytest.approx(0.08)
    assert row["stock_wall_us"] == pytest.approx(0.2)
    assert (row["comparable"], row["shape"]) == ("yes", "128x64")
    record.validate(row)


def test_wall_times_lost_in_noise_leave_the_gpu_time(device):
    row = device.row(clock=lambda: 0.0)
    assert row["us"] == pytest.approx(0.04) and row["wall_us"] is None
    assert row["note"].startswith("no wall time")
    with pytest.raises(NoiseError, match="128x64 M=1"):
        device.row(gpu_events=None, clock=lambda: 0.0)


def test_faster_than_memory_is_not_comparable(monkeypatch):
    row = Device(monkeypatch, qmv=0.0005, qmv_reduce=0.0001).row()
    assert "not read from memory" in row["comparable"]


def test_a_wrong_kernel_is_not_comparable(device, monkeypatch):
    right = kernel_suite.ours(SMALL)
    monkeypatch.setattr(kernel_suite, "ours", lambda p: lambda *a: right(*a) * 1.1)
    assert device.row()["comparable"].startswith("not comparable: wrong result")


def test_without_a_profiler_the_row_says_wall(device):
    def missing(fn):
        raise ProfileError("no torch here")

    row = device.row(gpu_events=missing)
    assert row["us_source"] == "wall" and row["us"] == row["wall_us"]
    assert row["note"] == "no GPU times: no torch here"


def test_the_cpu_executor_is_called_an_emulation(device):
    env = replace(H200, executor="cpu", chip=lookup("cpu"))
    row = device.row(env, gpu_events=None)
    assert row["note"].startswith("emulation") and row["frac_peak"] is None


def test_two_repeats_are_not_comparable(device):
    row = device.row(effort=replace(EFFORT, repeats=2))
    assert row["comparable"] == "not comparable: 2 repeats, 3 needed"


@pytest.mark.parametrize("bits, group, mode", FORMATS)
def test_weights_keep_the_size_of_x_and_ours_matches(bits, group, mode):
    mx.random.seed(0)
    dtype = "bfloat16"
    problem = Matmul(2, 96, 256, dtype, bits, group, mode)
    assert supports(problem) is None
    buffers = weights(problem)
    x = mx.random.normal((2, 256)).astype(mx.bfloat16)
    assert error_of(ours(problem), x, buffers, problem) < 0.03
    y = ours(problem)(x, *buffers).astype(mx.float32)
    assert 0.05 < mx.sqrt(mx.mean(y * y)).item() < 20


@pytest.mark.parametrize("m, n, k", [(1, 8, 8), (1, 12, 8), (2, 12, 8), (2, 3, 8)])
def test_a_chain_feeds_each_result_to_the_next(m, n, k):
    y = mx.arange(float(m * n)).reshape(m, n)
    x = link(y, Matmul(m, n, k))
    assert x.shape == (m, k)
    flat = y.reshape(-1).tolist()
    assert x.reshape(-1).tolist() == (flat * 9)[: m * k]


def test_weights_rotate_over_more_than_twice_the_cache():
    timer = kernel_suite.make_timer(SMALL, 100_000)
    used = sum(a.nbytes for a in timer.buffers[0]) * len(timer.buffers)
    assert used > 200_000
    seen = [id(next(timer.next)) for _ in timer.buffers]
    assert len(set(seen)) == len(seen)


def test_weights_too_small_to_be_cold_are_not_comparable(device, monkeypatch):
    monkeypatch.setattr(kernel_suite, "MAX_COPIES", 3)
    assert "too small to be cold" in device.row()["comparable"]


def test_host_rows_split_build_and_evaluate(device):
    row = kernel_suite.host_case(SMALL, H200, EFFORT, clock=device.clock)
    # The fake device spends its time in the call, so all of it is building.
    assert row["build_us"] == pytest.approx(0.08) and row["eval_us"] == 0
    assert row["stock_build_us"] == pytest.approx(0.2)
    assert row["ratio"] == pytest.approx(2.5)
    assert (row["suite"], row["us_source"]) == ("host", "host clock")


def test_default_cases_are_supported_and_start_with_the_main_ones():
    cases = list(kernel_suite.default_cases(quick=False))
    assert all(supports(case) is None for case in cases)
    assert len(set(cases)) == len(cases)
    assert cases[:10] == list(kernel_suite.default_cases(quick=True))
    assert {(c.K, c.N) for c in cases[:10]} >= {(8192, 28672), (4096, 128256)}
    assert {c.x_dtype for c in cases[:10]} == {"float16", "bfloat16"}
    assert {(c.bits, c.mode) for c in cases} >= {(2, "affine"), (4, "nvfp4")}


def run(sweeps, capsys, text):
    code = sweeps.main(text.split())
    return code, capsys.readouterr()


@pytest.mark.parametrize(
    "options, message",
    [
        ("--suite fast", "unknown suite 'fast': use decode, small_m, prefill, "),
        ("--suite decode --shapes 4096", "KxN such as 4096x14336"),
        ("--suite decode --shapes 64x64 --rows 0", "--rows takes numbers"),
        ("--suite decode --shapes 64x64 --rows 17", "M = 17"),
        ("--suite decode --shapes 64x64 --bits 7", "7-bit"),
        ("--suite decode --shapes 64x64 --modes fp4", "'fp4'"),
        ("--suite decode --shapes 100x64", "multiple of group_size"),
        ("--suite decode --shapes 64x64 --chain 5,5", "two rising lengths"),
        ("--suite decode --shapes 64x64 --repeats 0", "at least 1"),
        ("--suite e2e --tokens 1", "--tokens must be at least 2"),
        ("--suite e2e --models no-such-model", "no-such-model"),
    ],
)
def test_bad_options_give_one_line(sweeps, capsys, monkeypatch, options, message):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    code, out = run(sweeps, capsys, options)
    last = out.err.strip().splitlines()[-1]
    assert code == 2 and message in last and last.startswith("bench/kernels.py: error")


def test_the_default_shapes_are_not_emulated(sweeps, capsys, monkeypatch):
    env = replace(H200, executor="cpu")
    monkeypatch.setattr(sweeps, "environment", lambda: env)
    code, out = run(sweeps, capsys, "--suite decode --quick")
    assert code == 2 and "--shapes 512x512" in out.err


def test_a_kernel_that_does_not_run_leaves_the_other_cases(
    sweeps, capsys, device, monkeypatch
):
    def broken(problem, *args, **options):
        if problem.M == 1:
            raise RuntimeError("kernel does not compile")
        return real(problem, *args, clock=device.clock, **options)

    real = kernel_suite.measure_case
    monkeypatch.setattr(kernel_suite, "measure_case", broken)
    options = "--suite decode --shapes 128x64 --rows 1,2 --dtypes float16 --chain 1,2"
    code, out = run(sweeps, capsys, options)
    assert code == 0 and "128x64 M=1: kernel does not compile" in out.err
    assert "128x64" in out.out


def test_the_decode_suite_appends_rows(sweeps, capsys, tmp_path, device, monkeypatch):
    timed = partial(kernel_suite.measure_case, clock=device.clock)
    monkeypatch.setattr(kernel_suite, "measure_case", timed)
    path = tmp_path / "rows.jsonl"
    options = "--suite decode --shapes 128x64,64x96 --rows 1,2 --dtypes float16 "
    options += f"--repeats 3 --chain 1,6 --launches 1 --json {path}"
    code, out = run(sweeps, capsys, options)
    assert code == 0, out.err
    rows = record.read(path)
    assert [(r["shape"], r["M"]) for r in rows] == [
        ("128x64", 1),
        ("128x64", 2),
        ("64x96", 1),
        ("64x96", 2),
    ]
    for r in rows:
        assert r["comparable"] == "yes" and r["kernel"].startswith("qmv"), r
        assert r["us"] > 0 and r["stock_us"] > 0 and r["plan"]
    assert "128x64" in out.out


def test_a_run_that_is_cut_off_keeps_its_rows(sweeps, tmp_path, device, monkeypatch):
    def cut(problem, *args, **options):
        if problem.M == 2:
            raise KeyboardInterrupt
        return real(problem, *args, clock=device.clock, **options)

    real, path = kernel_suite.measure_case, tmp_path / "rows.jsonl"
    monkeypatch.setattr(kernel_suite, "measure_case", cut)
    options = "--suite decode --shapes 128x64 --rows 1,2 --dtypes float16 --chain 1,2"
    with pytest.raises(KeyboardInterrupt):
        sweeps.main([*options.split(), "--json", str(path)])
    assert [r["M"] for r in record.read(path)] == [1]


def test_the_budget_stops_the_sweep_and_names_what_is_left(sweeps, capsys):
    code, out = run(
        sweeps, capsys, "--suite decode --shapes 128x64 --rows 1,2 --budget -1"
    )
    assert code == 0
    assert out.err.count("not run, time budget: affine 4-bit g64") == 4


def test_layers_alone_of_a_model(sweeps, tmp_path):
    path = tmp_path / "rows.jsonl"
    options = "--suite e2e --models tiny --tokens 2 --prompt-tokens 2 --repeats 3"
    assert sweeps.main([*options.split(), "--layers-alone", "--json", str(path)]) == 0
    rows = record.read(path)
    assert {r["phase"] for r in rows} == {"prefill", "decode"}
    assert all("layers alone" in r["note"] for r in rows)
    kernels = {name.split()[0] for r in rows for name in r["served"]}
    assert kernels == {"qmv_triple", "qmv_pair", "qmv"}
