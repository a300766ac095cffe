"""The attention suite and quantised caches in the bench, on fake and real devices."""

import importlib.util
from dataclasses import replace
from functools import partial
from io import StringIO
from pathlib import Path

import mlx.core as mx
import pytest
from attention_models import tiny
from mlx_lm.models import base
from mlx_lm.models.cache import KVCache, QuantizedKVCache, RotatingKVCache
from rich.console import Console
from test_bench_kernels import EFFORT, H200

import mlx_phase
from mlx_phase.attention_ops import kernel_route
from mlx_phase.bench import BenchError, attention_suite, endtoend, record
from mlx_phase.bench.gpu_time import Event
from mlx_phase.bench.kv_cache import KV, PromptCache, check_head_dim
from mlx_phase.bench.table import show
from mlx_phase.problem import Sdpa

PATH = Path(__file__).parents[1] / "bench" / "kernels.py"
PATCHED = partial(mlx_phase.patched, check=False, steps=False)
SMALL = attention_suite.make_case(1, 9, (2, 1, 64), 16, "float32")


@pytest.fixture(scope="module")
def sweeps():
    spec = importlib.util.spec_from_file_location("bench_kernels", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Device:
    """A deterministic GPU: ours launches two kernels, stock one."""

    US = {"split": 2.0, "reduce": 1.0, "stock": 6.0}

    def __init__(self, monkeypatch):
        self.log, self.now = [], 0.0
        for side, names in (("ours", ["split", "reduce"]), ("stock", ["stock"])):
            make = self.counted(getattr(attention_suite, side), names)
            monkeypatch.setattr(attention_suite, side, make)

    def counted(self, make, names):
        def op_of(problem):
            real = make(problem)

            def run(q, *cache):
                o = real(q, *cache)
                self.log += names
                self.now += sum(1e-6 * self.US[name] for name in names)
                return o

            return run

        return op_of

    def events(self, fn):
        self.log.clear()
        fn()
        return [Event(n, float(i), self.US[n]) for i, n in enumerate(self.log)]

    def row(self, case=SMALL, env=H200):
        options = {"gpu_events": self.events, "clock": lambda: self.now}
        return attention_suite.measure_case(case, env, EFFORT, **options)


def test_a_row_has_the_times_of_both_sides_and_the_traffic(monkeypatch):
    row = Device(monkeypatch).row()
    assert (row["us"], row["stock_us"], row["ratio"]) == pytest.approx((3, 6, 2))
    assert row["us_source"] == "gpu profiler" and row["comparable"] == "yes"
    moved = 4 * 64 * (2 * 9 + 2 * 2)
    assert row["gbps"] == pytest.approx(moved / 3e-6 / 1e9)
    assert (row["heads"], row["q_len"], row["k_len"]) == ("2/1x64", 1, 9)
    assert (row["kernel"], row["bits"], row["mode"]) == ("sdpa_split", 32, "none")
    record.validate(row)


def test_where_stock_cannot_the_row_says_so(monkeypatch):
    def refuses(*args, **options):
        raise RuntimeError("No implementation for problem shape.\nmore")

    monkeypatch.setattr(base, "quantized_scaled_dot_product_attention", refuses)
    case = replace(SMALL, kv_bits=8)
    row = Device(monkeypatch).row(case)
    assert row["note"] == "stock can't: No implementation for problem shape."
    assert row["us"] == pytest.approx(3) and row["wall_us"] == pytest.approx(3)
    nulls = ("stock_us", "stock_wall_us", "stock_spread", "ratio")
    assert [row[name] for name in nulls] == [None] * 4
    assert (row["comparable"], row["bits"], row["group"]) == ("yes", 8, 64)
    assert "-" in [c for c in attention_suite.table([row]).columns[6].cells]


@pytest.mark.parametrize("bits", [16, 8])
def test_prompts_are_timed_also_where_the_plan_leaves_them_to_stock(bits, monkeypatch):
    case = attention_suite.make_case(20, 40, (2, 1, 192, 128), bits)
    row = Device(monkeypatch).row(case)
    kernel = "sdpa_prefill" + "_codes" * (bits < 16)
    assert (row["kernel"], row["heads"]) == (kernel, "2/1x192/128")
    assert row["comparable"] == "yes" and row["ratio"] == pytest.approx(2)
    assert "not planned" not in row["plan"]
    monkeypatch.setattr(attention_suite, "device_chip", lambda: H200.chip)
    q = mx.zeros((1, 2, 20, 192))
    plan = attention_suite.planned(case, q, attention_suite.cache_of(case))
    assert ", not planned here: q_len > 16: stock attention of " in plan


def test_a_wrong_kernel_is_not_comparable(monkeypatch):
    real = attention_suite.ours
    monkeypatch.setattr(attention_suite, "ours", lambda p: lambda *a: real(p)(*a) * 1.1)
    row = Device(monkeypatch).row()
    assert row["comparable"].startswith("not comparable: wrong result")


def test_caches_are_views_that_leave_the_chips_cache(monkeypatch):
    device, made = Device(monkeypatch), []
    real = attention_suite.cache_of

    def cache_of(p):
        made.append(real(p))
        return made[-1]

    monkeypatch.setattr(attention_suite, "cache_of", cache_of)
    assert device.row()["comparable"] == "yes"
    assert sum(a.nbytes for cache in made for a in cache) > 2 * H200.cache_bytes
    assert all(a.shape == (1, 1, 9, 64) for cache in made for a in cache)
    monkeypatch.setattr(attention_suite, "MAX_COPIES", 2)
    assert "too small to be cold" in device.row()["comparable"]


def test_default_cases_run_on_kernels_and_start_with_the_main_ones():
    cases = list(attention_suite.default_cases(quick=False))
    main = list(attention_suite.default_cases(quick=True))
    assert cases[: len(main)] == main and len(set(cases)) == len(cases)
    assert {c.k_len for c in cases} == {256, 1024, 8192, 32768, 131072}
    assert {c.q_len for c in cases} == {1, 2, 4, 8, 16}
    assert {c.kv_bits for c in cases} == {16, 8, 4}
    for heads, kv_heads, dim in attention_suite.HEADS:
        for bits in (16, 8, 4):
            p = Sdpa(heads, kv_heads, dim, dim, 16, k_bits=bits, v_bits=bits)
            assert kernel_route(p).name.startswith("sdpa")


@pytest.mark.parametrize(
    "options, message",
    [
        ("", "--k-lens 256"),
        ("--k-lens 9 --heads 32x128", "Hq/HkvxD such as 32/8x128"),
        ("--k-lens 9 --heads 4/2x33", "head dims (33, 33)"),
        ("--k-lens 9 --heads 2/1x64 --bits 6", "6-bit"),
        ("--k-lens 0", "--k-lens takes numbers"),
        ("--k-lens 9 --dtypes int8", "--dtypes takes float16"),
        ("--k-lens 9 --heads 2/1x64/", "Hq/HkvxD such as 32/8x128"),
        ("--k-lens 9 --q-lens 17", "--q-lens are the last of --k-lens"),
    ],
)
def test_bad_options_give_one_line(sweeps, capsys, options, message):
    assert sweeps.main(["--suite", "attention", *options.split()]) == 2
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("bench/kernels.py: error") and message in last


def test_the_suite_appends_rows(sweeps, capsys, tmp_path, monkeypatch):
    device = Device(monkeypatch)
    real = attention_suite.measure_case
    monkeypatch.setattr(
        attention_suite,
        "measure_case",
        lambda *a, **options: real(*a, clock=lambda: device.now, **options),
    )
    path = tmp_path / "rows.jsonl"
    options = "--suite attention --heads 2/1x64 --q-lens 1 --k-lens 9,300 --bits 16 "
    options += f"--dtypes float32 --repeats 3 --chain 1,3 --json {path}"
    assert sweeps.main(options.split()) == 0
    rows = record.read(path)
    assert [(r["k_len"], r["us_source"]) for r in rows] == [(9, "wall"), (300, "wall")]
    assert "2/1x64" in capsys.readouterr().out


def job(**more):
    options = {"name": "tiny", "config": {"vocab_size": 48}, "prompt": [1, 2, 3]}
    return endtoend.Job(**options | {"tokens": 3, "repeats": 1, "kv": KV(8)} | more)


def test_a_quantised_cache_on_both_sides():
    result = endtoend.measure(tiny(), job(host_steps=1), PATCHED)
    rows = endtoend.rows(result, H200)
    assert {(r["kv_bits"], r["kv_group"]) for r in rows} == {(8, 64)}
    assert any(name.startswith("sdpa_split_codes") for name in result.served)
    assert result.equal.text == "yes" and result.stock.runs


def test_a_side_that_stock_refuses_is_left_out(monkeypatch):
    def refuses(*args, **options):
        raise RuntimeError("No implementation for problem shape.")

    monkeypatch.setattr(base, "quantized_scaled_dot_product_attention", refuses)
    result = endtoend.measure(tiny(), job(), PATCHED)
    prefill, decode = endtoend.rows(result, H200)
    assert (
        decode["note"] == "stock can't run this: No implementation for problem shape."
    )
    assert decode["tok_s"] > 0 and decode.get("stock_tok_s") is None
    out = StringIO()
    console = Console(file=out, width=200)
    show(console, result, [prefill, decode], H200, "test")
    assert "stock can't run this" in out.getvalue()
    assert "8-bit KV cache g64" in out.getvalue()
    # Without --kv-bits an error is an error.
    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", refuses)
    with pytest.raises(RuntimeError, match="No implementation"):
        endtoend.measure(tiny(), job(kv=None, stock=True), PATCHED)


def test_of_mixed_caches_only_plain_ones_are_quantised(monkeypatch):
    model = tiny()
    kinds = [KVCache, lambda: RotatingKVCache(8)]
    monkeypatch.setattr(
        "mlx_phase.bench.kv_cache.make_prompt_cache", lambda m: [k() for k in kinds]
    )
    cache = PromptCache(model, KV(4, 32))
    assert [type(c) for c in cache.layers] == [QuantizedKVCache, RotatingKVCache]
    assert not cache.options and cache.layers[0].bits == 4
    kinds.pop(0)
    with pytest.raises(BenchError, match="RotatingKVCache"):
        PromptCache(model, KV(4, 32))


def test_heads_that_are_no_multiple_of_a_group_are_refused():
    check_head_dim({"head_dim": 128}, KV(8))
    check_head_dim({"hidden_size": 576, "num_attention_heads": 9}, KV(8))
    with pytest.raises(BenchError, match="head_dim 80 is no multiple"):
        check_head_dim({"hidden_size": 160, "num_attention_heads": 2}, KV(8))
