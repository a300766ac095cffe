"""The suite of small M: exact kernel, matrix units and stock, timed in turn."""

import importlib.util
from dataclasses import replace

import pytest
from rich.console import Console
from test_bench_kernels import EFFORT, H200, PATH

from mlx_phase.bench import kernel_suite, record, small_m_suite
from mlx_phase.bench.gpu_time import Event, ProfileError
from mlx_phase.bench.measure import NoiseError
from mlx_phase.plan import MAX_M
from mlx_phase.problem import Matmul

SMALL = Matmul(8, 64, 128, "bfloat16", 4, 64)
US = {"qmv": 0.06, "qmm_small": 0.04, "stock": 0.1}


@pytest.fixture(scope="module")
def sweeps():
    spec = importlib.util.spec_from_file_location("bench_kernels", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Device:
    """A deterministic GPU: each launch moves its clock, and it records kernels."""

    def __init__(self, monkeypatch):
        self.log, self.now, self.scale = [], 0.0, 1.0
        real = small_m_suite.planned, small_m_suite.stock
        wrapped = (
            lambda p, chosen: self.counted(chosen.kernel, real[0](p, chosen)),
            lambda p: self.counted("stock", real[1](p)),
        )
        monkeypatch.setattr(small_m_suite, "planned", wrapped[0])
        monkeypatch.setattr(small_m_suite, "stock", wrapped[1])

    def counted(self, name, op):
        def run(x, *buffers):
            self.log.append(name)
            self.now += 2e-6 * US[name]
            return self.scale * op(x, *buffers)

        return run

    def clock(self):
        return self.now

    def events(self, fn):
        self.log.clear()
        fn()
        return [Event(n, float(i), US[n]) for i, n in enumerate(self.log)]

    def rows(self, problem=SMALL, env=H200, effort=EFFORT, **options):
        options = {"gpu_events": self.events, "clock": self.clock} | options
        return small_m_suite.measure_case(problem, env, effort, **options)


@pytest.fixture
def device(monkeypatch):
    return Device(monkeypatch)


def test_the_two_kernels_have_a_row_each_against_the_same_stock(device):
    exact, matrix = device.rows()
    assert (exact["kernel"], matrix["kernel"]) == ("qmv", "qmm_small")
    assert (exact["us"], matrix["us"]) == (pytest.approx(0.06), pytest.approx(0.04))
    assert exact["stock_us"] == matrix["stock_us"] == pytest.approx(0.1)
    assert exact["ratio"] == pytest.approx(1 / 0.6)
    assert matrix["ratio"] == pytest.approx(2.5)
    assert exact["wall_us"] == pytest.approx(0.12)
    assert matrix["wall_us"] == pytest.approx(0.08)
    for row in (exact, matrix):
        record.validate(row)
        assert (row["suite"], row["comparable"], row["M"]) == ("small_m", "yes", 8)
        assert ("exact=True" in row["plan"]) == (row["kernel"] == "qmv")
        assert row["us_source"] == "gpu profiler" and row["spread"] == 0


def test_one_row_has_no_matrix_units(device):
    (only,) = device.rows(replace(SMALL, M=1))
    assert only["kernel"] == "qmv"


def test_weights_are_the_same_for_every_m_and_cold(device, monkeypatch):
    small_m_suite._weights.cache_clear()
    made = []
    real = small_m_suite.weights
    monkeypatch.setattr(small_m_suite, "weights", lambda p: made.append(p) or real(p))
    device.rows(replace(SMALL, M=1)), device.rows()
    each = sum(a.nbytes for a in real(SMALL))
    assert len(made) * each > 2 * H200.cache_bytes
    monkeypatch.setattr(small_m_suite, "MAX_COPIES", 2)
    small_m_suite._weights.cache_clear()
    assert all("too small to be cold" in row["comparable"] for row in device.rows())
    small_m_suite._weights.cache_clear()


def test_wrong_results_noise_and_missing_profilers_are_said(device, capsys):
    device.scale = 1.1
    for row in device.rows():
        assert row["comparable"].startswith("not comparable: wrong result")
    why = row | {"comparable": "not comparable: [/x.h]"}
    Console(width=400).print(small_m_suite.table([why]))
    assert why["comparable"] in capsys.readouterr().out
    device.scale = 1.0

    def missing(fn):
        raise ProfileError("no torch here")

    for row in device.rows(gpu_events=missing):
        assert row["us_source"] == "wall" and "no torch here" in row["note"]
    with pytest.raises(NoiseError, match="128x64 M=8"):
        device.rows(gpu_events=None, clock=lambda: 0.0)


def test_default_cases_are_every_m_of_five_shapes_and_two_dtypes():
    cases = list(small_m_suite.default_cases(quick=False))
    assert len(cases) == len(set(cases)) == 5 * 2 * MAX_M
    quick = list(small_m_suite.default_cases(quick=True))
    assert set(quick) < set(cases) and len(quick) == 3 * 2 * 5
    assert {c.M for c in quick} == {1, 2, 4, 8, 16}
    assert {c.x_dtype for c in quick} == {"float16", "bfloat16"}
    for case in quick:
        assert list(small_m_suite.plans_of(case)) == ["A", "C"][: 1 + (case.M > 1)]
    assert {(c.K, c.N) for c in cases} == {
        kernel_suite.shape_of(text) for text in kernel_suite.MAIN
    }


def test_the_suite_runs_prints_costs_and_appends_rows(
    sweeps, capsys, tmp_path, device, monkeypatch
):
    def timed(*args, **options):
        return real(*args, clock=device.clock, **options)

    real = small_m_suite.measure_case
    monkeypatch.setattr(small_m_suite, "measure_case", timed)
    path = tmp_path / "rows.jsonl"
    options = "--suite small_m --shapes 128x64 --dtypes float16 --rows 1,6 --repeats 3"
    code = sweeps.main([*options.split(), "--chain", "1,3", "--json", str(path)])
    out = capsys.readouterr()
    assert code == 0, out.err
    rows = [(r["M"], r["kernel"]) for r in record.read(path)]
    assert rows == [(1, "qmv"), (6, "qmv"), (6, "qmm_small")]
    costs = [line.split("│")[6].strip() for line in out.out.splitlines() if "│" in line]
    assert costs == ["1.00", "1.00", "0.67"]
    assert sweeps.main(["--suite", "small_m"]) == 2
    assert "--shapes 512x512" in capsys.readouterr().err
