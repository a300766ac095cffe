"""End-to-end bench: interleaving on fakes, and the real command on a tiny model."""

import json
import os
import sys
from contextlib import contextmanager
from types import SimpleNamespace

import mlx.core as mx
import mlx.nn as nn
import pytest
from bench_models import Tokenizer, config, run_of, tiny

from mlx_phase import command, ops
from mlx_phase.bench import __main__ as cli
from mlx_phase.bench import endtoend, prompts, record
from mlx_phase.bench import generate as gen
from mlx_phase.bench.device import EMULATION, Environment, environment
from mlx_phase.chip import CPU, lookup

H200 = Environment(
    lookup("h200"),
    "NVIDIA H200",
    "Linux",
    "cuda",
    {"mlx": "0.32.4", "mlx_lm": "0.32.2", "mlx_phase": "0.1.0"},
)


# --- interleaving ---


class Patch:
    """Stands for `patched`: knows whether it is active."""

    active = False

    @contextmanager
    def __call__(self, model):
        self.active = True
        yield "report"
        self.active = False


def measured(repeats=4, stock=True, tokens=(3, 1, 2), **change):
    patch, log = Patch(), []

    def fake(model, prompt, n, *, on_token, keep_logprobs=False):
        log.append("A" if patch.active else "B")
        step = 0.1 if patch.active else 0.3
        ids = list(change.get("ours", tokens) if patch.active else tokens)
        run = run_of([0.4 + step * i for i in range(n)], ids, len(prompt))
        if keep_logprobs:
            run.logprobs = [-5.0 * mx.arange(8.0) for _ in ids]
        return run

    job = endtoend.Job("m", config(), [1, 2, 3, 4], 3, repeats, stock=stock)
    result = endtoend.measure(tiny(), job, patch, generate=fake)
    return result, log


def test_sides_are_warmed_up_then_interleaved():
    result, log = measured(repeats=4)
    assert "".join(log) == "AB" + "ABBAABBA"
    assert len(log) == result.job.runs
    assert len(result.patched.runs) == len(result.stock.runs) == 4
    assert result.comparable == "yes" and result.equal.text == "yes"
    assert result.report == "report"


@pytest.mark.parametrize("executor, begun", [("cuda", 2), ("cpu", 0)])
def test_what_is_timed_is_traced_before(monkeypatch, executor, begun):
    """Else the time to the first token has the making of a step's trace in it."""
    tokens = []
    real = endtoend.generate

    def watched(model, prompt, n, **options):
        tokens.append((len(prompt), n))
        return real(model, prompt, n, **options)

    monkeypatch.setattr(endtoend, "generate", watched)
    monkeypatch.setattr(endtoend, "executor_name", lambda: executor)
    ops.reset_served()
    endtoend.settle(tiny(), [1, 2, 3], None)
    assert tokens == [(3, begun)] * (begun > 0) and not ops.served()


def test_the_answer_comes_with_the_warm_up():
    answers, runs = [], []

    def fake(*args, **options):
        runs.append(1)
        return run_of([0.1, 0.2], [7, 8])

    job = endtoend.Job("m", config(), [1], 2, 3)
    answer = lambda tokens: answers.append((tokens, len(runs)))  # noqa: E731
    endtoend.measure(tiny(), job, Patch(), generate=fake, on_answer=answer)
    assert answers == [([7, 8], 1)]


def test_rows_hold_both_phases():
    result, _ = measured()
    prefill, decode = endtoend.rows(result, H200)
    assert (prefill["phase"], decode["phase"]) == ("prefill", "decode")
    assert prefill["ttft_ms"] == pytest.approx(400)
    assert prefill["tok_s"] == pytest.approx(4 / 0.4)
    assert decode["tok_s"] == pytest.approx(10)
    assert decode["stock_tok_s"] == pytest.approx(1 / 0.3)
    assert decode["ratio"] == pytest.approx(3)
    assert decode["itl_p99_ms"] == pytest.approx(100)
    moved = result.weight_bytes + 64
    assert decode["bytes_per_token"] == moved
    assert decode["frac_peak"] == pytest.approx(moved / 0.1 / 4800e9)
    assert (decode["chip"], decode["model"]) == ("h200-132", "m")


def test_two_repeats_are_not_comparable():
    result, _ = measured(repeats=2)
    for row in endtoend.rows(result, H200):
        assert row["comparable"] == "not comparable: 2 repeats, 3 needed"


def test_other_tokens_are_a_failed_check():
    result, _ = measured(ours=(3, 1, 6))
    assert "tokens differ at token 3" in result.comparable
    assert endtoend.rows(result, H200)[1]["tokens_equal"].startswith("differ")


def test_a_kernel_that_is_off_is_a_failed_check():
    ops.disable("qmv test", "wrong result")
    result, _ = measured()
    assert result.comparable == "not comparable: kernel qmv test: wrong result"


def test_without_stock_only_our_side_runs():
    result, log = measured(stock=False, repeats=3)
    assert log == ["A"] * 4
    row = endtoend.rows(result, H200)[1]
    assert row["stock_us"] is None and row["ratio"] is None
    assert row["tokens_equal"] == endtoend.NOT_COMPARED


def test_the_bench_rests_between_runs():
    naps = []
    job = endtoend.Job("m", config(), [1], 2, 3, stock=False, delay=1.5)
    fake = lambda *a, **k: run_of([0.1, 0.2])  # noqa: E731
    endtoend.measure(tiny(), job, Patch(), generate=fake, sleep=naps.append)
    assert naps == [1.5] * 3


# --- the command ---


@pytest.mark.parametrize(
    "options, message",
    [
        ("--tokens 1", "at least 2, got '1'"),
        ("--tokens x", "at least 2, got 'x'"),
        ("--repeats 0", "at least 1, got '0'"),
        ("--prompt-tokens 8,0", "at least 1 with commas between, got '8,0'"),
        ("--prompt-tokens 8,,5", "commas between, got '8,,5'"),
        ("--draft-tokens a", "commas between, got 'a'"),
        ("--seed -1", "at least 0, got '-1'"),
        ("--delay -2", "seconds >= 0, got '-2'"),
    ],
)
def test_bad_numbers_are_refused(capsys, options, message):
    with pytest.raises(SystemExit) as exit_:
        cli.main(options.split())
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "options, message",
    [
        (["--prompt", "a", "--prompt-tokens", "8"], "exclude each other"),
        (["--prompt", "  "], "--prompt is empty"),
        (["--raw"], "--raw only goes with --prompt"),
        ("--draft lookup --draft-tokens 1,16".split(), "numbers of 1 to 15"),
        (["--json", "{tmp}"], "is a folder: name a file"),
        (["--json", "/dev/null"], "is a device: name a file"),
        (["--json", "{tmp}/bad.jsonl/new/rows.jsonl"], "bad.jsonl is in the way"),
        (["--json", "{tmp}/bad.jsonl"], "bad.jsonl:1: not JSON"),
        (["--model", "no-such-model-anywhere"], "no-such-model-anywhere"),
    ],
)
def test_bad_options_give_one_line_before_anything_runs(
    capsys, tmp_path, monkeypatch, options, message
):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "bad.jsonl").write_text("{\n")
    options = [option.replace("{tmp}", str(tmp_path)) for option in options]
    assert cli.main(options) == 2
    (err,) = capsys.readouterr().err.strip().splitlines()
    assert err.startswith("mlx_phase.bench: error: ") and message in err


def test_a_command_that_is_cut_off_ends_without_a_traceback(capsys, monkeypatch):
    def interrupted():
        raise KeyboardInterrupt

    assert command.run(lambda: 2, "x") == 2
    assert command.run(interrupted, "mlx_phase.bench") == 130
    assert capsys.readouterr().err == "mlx_phase.bench: stopped\n"
    reader, writer = os.pipe()
    os.close(reader)
    monkeypatch.setattr(sys, "stdout", os.fdopen(writer, "w"))
    assert command.run(lambda: print("a line") or 0, "x") == 141
    sys.stdout.close()  # would fail again if the pipe were still behind it


@pytest.fixture
def loaded(monkeypatch):
    def install(tokenizer=None):
        found = SimpleNamespace(
            model=tiny(),
            tokenizer=tokenizer,
            name="a [/folder]/tiny",  # rich takes such a name for markup
            config=config(),
            source="made by the test",
        )
        monkeypatch.setattr(cli, "load", lambda spec: found)
        return found

    return install


def test_the_command_measures_both_sides_and_appends_rows(
    capsys, tmp_path, loaded, monkeypatch
):
    monkeypatch.setenv("COLUMNS", "120")
    model = loaded().model
    path = tmp_path / "rows.jsonl"
    options = ["--tokens", "3", "--prompt-tokens", "2,18", "--json", str(path)]
    assert cli.main(options) == 0
    out = capsys.readouterr().out
    for text in ("time to first token", "inter-token latency p99", "decode"):
        assert text in out
    assert "served, prompt" in out and "served, steps" in out
    rows = record.read(path)
    assert [(r["prompt_tokens"], r["phase"]) for r in rows] == [
        (n, phase) for n in (2, 18) for phase in ("prefill", "decode")
    ]
    for row in rows:
        assert row["tokens_equal"] == "yes" and row["comparable"] == "yes"
        assert (row["bits"], row["group"], row["mode"]) == (4, 32, "affine")
        assert row["dtype"] == "float32"
        assert row["chip"] == environment().chip.key
    # 17 rows of the prompt are a chunk on the prefill kernels, the last token a step.
    *short, chunk, steps = ({n.split()[0] for n in r["served"]} for r in rows)
    assert all(any(n.startswith("qmv") for n in names) for names in [*short, steps])
    if environment().executor == "cpu":
        assert "qmm" in chunk and not any(n.startswith("qmv") for n in chunk)
        assert "qmm" not in steps
    # The bench leaves the model as it found it.
    assert type(model.model.layers[0].mlp.up_proj) is nn.QuantizedLinear
    if environment().executor == "cpu":
        assert EMULATION.split(":")[1].split(".")[0].strip() in " ".join(out.split())
        assert rows[0]["note"].startswith("emulation")
        assert environment().chip is CPU


def test_the_answer_to_a_prompt_is_printed(capsys, loaded):
    model = loaded(Tokenizer()).model
    assert cli.main("--tokens 4 --repeats 1 --no-stock --prompt HELLO".split()) == 0
    out = capsys.readouterr().out
    run = gen.generate(model, Tokenizer().encode("HELLO"), 4)
    assert out.splitlines()[0] == prompts.text_of(Tokenizer(), run.tokens).strip()
    assert "not comparable: 1 repeats, 3 needed" in out


def test_a_prompt_needs_a_tokenizer(capsys, loaded):
    loaded()
    assert cli.main(["--prompt", "hi"]) == 2
    assert "no tokenizer" in capsys.readouterr().err


def test_rows_are_plain_json(loaded, tmp_path):
    loaded()
    path = tmp_path / "r.jsonl"
    cli.main(["--tokens", "2", "--repeats", "1", "--no-stock", "--json", str(path)])
    for line in path.read_text().splitlines():
        assert set(json.loads(line)) == set(record.FIELDS)
