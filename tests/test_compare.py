"""Comparison of measured chips: like with like, and the reason where it is not."""

import json
from pathlib import Path

import pytest
from compare_case import M1, Files, one, pair, tables

from mlx_phase.bench import BenchError, __main__, compare
from mlx_phase.bench import compare_show as show

ROOT = Path(__file__).parents[1]


@pytest.fixture
def file(tmp_path):
    return Files(tmp_path)


def test_two_chips_of_one_kind_share_a_table(file):
    table = one(file(pair()), file(pair(**M1, speed=12.0)))
    assert [line.chip.key for line in table.lines] == ["m1-8", "m4-max-40"]
    m4 = table.lines[1]
    assert (m4.measured.decode, m4.measured.stock_decode) == (80.0, 70.0)
    assert (m4.measured.prefill, m4.measured.stock_prefill) == (800.0, 790.0)
    assert m4.per_gbs == pytest.approx(80 / 546)
    assert m4.mbu == pytest.approx(80 * 4.5 / 546)
    assert m4.published is None
    heads, rows = show.cells(table)
    assert not any("published" in head for head in heads)
    assert rows[1][:5] == ["M4 Max", "40", "546", "80.0", "70.0"]


@pytest.mark.parametrize(
    "change, name, values",
    [
        ({"model": "llama-1b"}, "model", "llama-1b, llama-8b"),
        ({"bits": 8}, "quantisation", "affine 4-bit g64.*affine 8-bit g64"),
        ({"group": 32}, "quantisation", "g32.*g64"),
        ({"mode": "mxfp4", "group": 32}, "quantisation", "affine.*mxfp4"),
        ({"dtype": "float16"}, "quantisation", "bfloat16 activations.*, .*float16"),
        ({"prompt_tokens": 64}, "prompt length", "512, 64"),
        ({"tokens": 32}, "generated tokens", "128, 32"),
        ({"mlx": "0.33.0"}, "build", "mlx 0.32.4.*mlx 0.33.0"),
        ({"mlx_lm": "0.33.0"}, "build", "mlx-lm 0.32.2.*mlx-lm 0.33.0"),
        ({"mlx_phase": "0.2.0"}, "build", "mlx_phase 0.1.0.*mlx_phase 0.2.0"),
    ],
)
def test_rows_that_differ_are_not_mixed(file, change, name, values):
    paths = file(pair()), file(pair(**M1, **change))
    with pytest.raises(BenchError, match=rf"differ in {name} \(.*{values}.*\)\. "):
        tables(*paths)
    both = tables(*paths, "--each")
    assert [len(table.lines) for table in both] == [1, 1]


def test_the_difference_names_nothing_that_is_equal(file):
    with pytest.raises(BenchError) as error:
        tables(file(pair(), pair(tokens=32)))
    assert "generated tokens (128, 32)." in str(error.value)
    assert "model (" not in str(error.value) and "build (" not in str(error.value)


@pytest.mark.parametrize(
    "options",
    [
        ["--model", "Llama-3.1-8B-Instruct"],
        ["--quant", "4-bit"],
        ["--prompt-tokens", "512"],
        ["--tokens", "128"],
        ["--build", "mlx 0.32.4"],
    ],
)
def test_an_option_chooses(file, options):
    other = {"model": "llama-1b", "bits": 8, "prompt_tokens": 64, "tokens": 32}
    path = file(pair(), pair(**other, mlx="0.33.0", speed=200.0))
    table = one(path, *options)
    assert [line.measured.decode for line in table.lines] == [80.0]
    with pytest.raises(BenchError, match="no measured row fits"):
        tables(path, "--model", "llama-70b")


def test_what_cannot_be_compared_is_left_out_and_said(file):
    kernel = pair()[1] | {"suite": "decode", "kernel": "qmv", "model": None}
    path = file(
        pair(),
        pair(executor="cpu", chip="cpu", device="x86"),
        pair(**M1, comparable="not comparable: 2 repeats, 3 needed", repeats=2),
        [kernel],
    )
    table = one(path)
    assert [line.chip.key for line in table.lines] == ["m4-max-40"]
    said = "\n".join(table.left_out)
    assert "2 rows of the CPU executor: times of an emulation" in said
    assert "2 rows not comparable: 2 repeats, 3 needed" in said
    assert "1 rows of single kernels" in said


def test_only_unfit_rows_are_an_error(file):
    path = file(pair(executor="cpu", chip="cpu", device="x86"))
    with pytest.raises(BenchError, match="no end-to-end row .* emulation.*--json"):
        tables(path)


def test_the_newest_run_counts(file):
    new = pair(speed=90.0, date="2026-12-24T12:00:00+00:00")
    (line,) = one(file(new, pair())).lines
    assert line.measured.decode == 90.0
    assert "2026-12-24" in line.measured.source
    assert "newest of 2 runs" in line.measured.source


def test_an_unknown_bandwidth_is_not_guessed(file):
    rows = pair()
    rows[1]["frac_peak"] = None  # the bench could not tell 410 from 546 GB/s
    (line,) = one(file(rows)).lines
    assert (line.chip.name, line.chip.bandwidth_gbs) == ("M4 Max", None)
    assert line.mbu is None and line.per_gbs is None and line.predicted is None
    (line,) = one(file(pair(chip="m9-12", device="Apple M9"))).lines
    assert (line.chip.name, line.mbu) == ("Apple M9", None)


def test_json_and_markdown_say_the_same(file, capsys):
    path = str(file(pair(note="warm | cold")))
    assert compare.main([path, "--json"]) == 0
    (table,) = json.loads(capsys.readouterr().out)
    (line,) = table["lines"]
    assert line["measured"]["decode_tok_s"] == 80.0 and line["published"] is None
    assert line["predicted"]["decode"]["low"] < line["predicted"]["decode"]["speed"]
    assert line["basis"] == "measured" and table["published"] is None
    assert table["measured"]["build"] == "mlx 0.32.4, mlx-lm 0.32.2, mlx_phase 0.1.0"
    assert compare.main([path, "--markdown"]) == 0
    text = capsys.readouterr().out
    assert "| M4 Max | 40 | 546 | 80.0 | 70.0 | 800 | 790 |" in text
    assert "1. measured: Apple M4 Max, macOS 26.2, 2026-11-29, 5 repeats" in text


def test_the_bench_command_dispatches(file, capsys):
    assert __main__.main(["compare", str(file(pair()))]) == 0
    out = capsys.readouterr().out
    assert "Measured: llama-8b" in out and "Predicted figures were not measured" in out
    assert __main__.main(["compare", "--list"]) == 0
    assert "31 chips: LLaMA-2 7B, Q4_0" in capsys.readouterr().out


@pytest.mark.parametrize(
    "argv, message",
    [
        ([], "give result files, or --published"),
        (["missing.jsonl"], "missing.jsonl"),
        (["--published", "--quant", "Q9"], "no published row fits"),
        (["--published", "--plot", "x.txt"], "name a .png"),
        (["--published", "--plot", "no/such/folder/x.png"], "no/such/folder"),
        (["--update", "x.md", "--largest"], "--update takes no other option"),
        (["--update", "missing.md"], "missing.md"),
    ],
)
def test_bad_input_is_one_line_and_status_2(
    argv, message, capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    assert compare.main(argv) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1


def test_a_bad_file_is_named_with_its_line(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps(pair()[0] | {"schema": 2}) + "\n")
    with pytest.raises(BenchError, match="x.jsonl:1: schema 2"):
        tables(path)


def test_results_of_this_project_can_be_compared():
    files = sorted((ROOT / "bench" / "results").glob("*.jsonl"))
    found = tables(*files, "--each", "--published") if files else []
    for table in found:
        assert table.measured is not None and table.lines
        assert isinstance(show.as_json(table), dict)
