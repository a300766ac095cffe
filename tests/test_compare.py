"""Comparison of chips: like with like, every figure in its column and with a source."""

import json
import sys
from pathlib import Path

import pytest

from mlx_phase import predict_fit
from mlx_phase.bench import BenchError, __main__, compare, compare_plot, record
from mlx_phase.bench import compare_show as show
from mlx_phase.bench.published import format_name, model_name, series
from mlx_phase.predict_data import published

ROOT = Path(__file__).parents[1]
M4_MAX = {"chip": "m4-max-40", "device": "Apple M4 Max", "executor": "apple"}
M1 = {"chip": "m1-8", "device": "Apple M1", "executor": "apple"}


def pair(**change):
    """The prefill and the decode row of one made-up run."""
    shared = {
        "suite": "e2e",
        "model": "llama-8b",
        "prompt_tokens": 512,
        "tokens": 128,
        "dtype": "bfloat16",
        "bits": 4,
        "group": 64,
        "mode": "affine",
        "repeats": 5,
        "delay_s": 0.0,
        "comparable": "yes",
        "os": "macOS 26.2",
        "mlx": "0.32.4",
        "mlx_lm": "0.32.2",
        "mlx_phase": "0.1.0",
        "date": "2026-11-29T12:00:00+00:00",
        **M4_MAX,
        **change,
    }
    shared.pop("speed", None)
    speed = change.get("speed", 80.0)
    decode = {
        "phase": "decode",
        "tok_s": speed,
        "stock_tok_s": 70.0,
        "bytes_per_token": 4_500_000_000,
        "gbps": 360.0,
        "frac_peak": 0.66,
    }
    prefill = {"phase": "prefill", "tok_s": 800.0, "stock_tok_s": 790.0}
    return [record.row(**shared, **prefill), record.row(**shared, **decode)]


@pytest.fixture
def file(tmp_path):
    """`file(rows, ...)` writes rows to a results file and returns its path."""

    def write(*pairs):
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.jsonl"
        record.append(path, [row for rows in pairs for row in rows])
        return path

    return write


def tables(*argv):
    return compare.tables(compare.parser().parse_args([str(a) for a in argv]))


def one(*argv):
    (table,) = tables(*argv)
    return table


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


def test_published_rows_join_in_their_own_columns(file):
    run = {"model": "mlx-community/Qwen3-8B-4bit", "tokens": 1024}
    table = one(file(pair(**run)), "--published")
    (line,) = [line for line in table.lines if line.chip.key == "m4-max-40"]
    assert line.measured.decode == 80.0 and line.published.decode == 90.0
    assert line.mbu == pytest.approx(80 * 4.5 / 546), "MBU is of the measured speed"
    heads, rows = show.cells(table)
    assert rows[0][heads.index("decode, patched")] == "80.0"
    assert rows[0][heads.index("published decode")] == "90.0"
    assert "mlx-lm 0.31.3" in show.markdown(table)


@pytest.mark.parametrize(
    "change, why",
    [
        ({"tokens": 128}, "another format, prompt or number of tokens"),
        ({"tokens": 1024, "prompt_tokens": 64}, "another format, prompt or number"),
        ({"tokens": 1024, "bits": 8}, "another format, prompt or number of tokens"),
        ({"tokens": 1024, "model": "nobody-7b"}, "no row of nobody-7b"),
    ],
)
def test_other_published_rows_do_not_join(file, change, why):
    path = file(pair(**{"model": "Qwen3-8B", **change}))
    table = one(path, "--published")
    assert all(line.published is None for line in table.lines)
    assert any(why in text for text in table.left_out)


def test_predictions_beside_published_rows_are_of_other_chips():
    table = one("--published")
    (line,) = [line for line in table.lines if line.chip.key == "m4-max-40"]
    (residual,) = [
        r
        for r in predict_fit.left_out("decode")
        if r.row == line.published.row
    ]  # fmt: skip
    assert line.predicted.decode.speed == residual.predicted_tok_s
    assert line.predicted.decode.low < line.predicted.decode.speed
    assert line.predicted.decode.speed != line.published.decode


def test_measured_lines_get_a_prediction_where_there_is_one(file):
    h200 = {"chip": "h200-132", "device": "NVIDIA H200", "executor": "cuda"}
    lines = one(file(pair(), pair(**h200))).lines
    assert {line.chip.name: line.predicted is not None for line in lines} == {
        "M4 Max": True,
        "H200": False,
    }


def test_default_published_table():
    table = one("--published")
    assert table.published.text == (
        "LLaMA-2 7B, Q4_0, prompt 512 tokens, 128 generated, llama.cpp 8e672ef"
    )
    found = {line.chip.key: line for line in table.lines}
    assert len(found) == len(table.lines) == 31
    assert found["m1-8"].published.decode == 14.15
    assert found["m4-max-40"].published.prefill == 885.68
    assert found["m5-max-40"].published.decode == pytest.approx((102.93 + 104.03) / 2)
    assert found["m5-max-40"].published.note == "mean of 2 runs"
    # 3.78 GB a token: 14.15 tok/s on 68 GB/s.
    assert found["m1-8"].mbu == pytest.approx(0.787, abs=0.003)
    assert all(line.measured is None for line in table.lines)
    assert len(one("--published", "--largest").lines) == 18


def test_published_series_hold_one_build_and_every_row_a_source():
    groups, left_out = series()
    for group, speeds in groups.items():
        builds = {s.row.build.removesuffix(" (as stated)") for s in speeds}
        assert len(builds) == 1 and group.build.endswith(builds.pop())
        assert all(s.source and ", grade " in s.source for s in speeds)
        assert len({s.chip.key for s in speeds}) == len(speeds)
    unplaced = sum(int(text.split()[0]) for text in left_out)
    placed = [
        r
        for r in published()
        if r.build and r.gpu_cores and r.prompt_tokens and ".x" not in r.build
    ]
    assert len(placed) + unplaced == len(published())


def test_published_builds_are_not_mixed():
    with pytest.raises(BenchError, match=r"differ in build \(llama.cpp 2.*8e672ef"):
        tables("--published", "--model", "LLaMA-2 7B", "--quant", "Q4_0", "--build",
               "llama.cpp")  # fmt: skip


@pytest.mark.parametrize(
    "text, name",
    [
        ("mlx-community/Llama-3.2-3B-Instruct-4bit", "llama-3b"),
        ("llama-8b:bits=6,group=32", "llama-8b"),
        ("Meta-Llama-3-8B", "llama-8b"),
        ("Qwen3-4B-Instruct-2507", "qwen3-4b"),
        ("LLaMA-2 7B", "llama-2-7b"),
        ("Qwen2.5-7B", "qwen2.5-7b"),
    ],
)
def test_model_names(text, name):
    assert model_name(text) == name


@pytest.mark.parametrize(
    "text, name",
    [
        ("q4", "affine 4-bit g64"),
        ("4-bit", "affine 4-bit g64"),
        ("q5 g32", "affine 5-bit g32"),
        ("bf16", "bfloat16"),
        ("Q4_0", "Q4_0"),
        ("Q8_0", "Q8_0"),
        ("MXFP4", "MXFP4"),
    ],
)
def test_format_names(text, name):
    assert format_name(text) == name


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


def test_plot_has_a_point_for_each_chip(file, tmp_path):
    pytest.importorskip("matplotlib")
    table = one("--published")
    (axes,) = compare_plot.draw(table).axes
    marks = [line.get_marker() for line in axes.lines if len(line.get_xdata()) == 1]
    assert marks.count("o") == len(table.lines)
    assert marks.count("_") == len(table.lines)
    roof = axes.lines[0]
    (x, _), (y, _) = roof.get_xdata(), roof.get_ydata()
    assert y == pytest.approx(x * 1e9 / table.bytes_per_token)
    names = {text.get_text() for text in axes.texts}
    assert {"M1", "M5 Max", "roofline: 100 % MBU"} <= names
    # Nothing may stand above the roof: no chip reads faster than its memory.
    for line in table.lines:
        assert line.published.decode < table.roof(line.chip.bandwidth_gbs)
    out = tmp_path / "x.png"
    assert compare.main([str(file(pair())), "--plot", str(out)]) == 0
    assert out.read_bytes().startswith(b"\x89PNG")


def test_plot_without_matplotlib_says_how_to_get_it(file, monkeypatch):
    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(BenchError, match=r"pip install 'mlx-phase\[plot\]'"):
        compare_plot.draw(one(file(pair())))


def test_a_plot_holds_one_table(file, tmp_path, capsys):
    path = file(pair(), pair(tokens=32))
    argv = [str(path), "--each", "--plot", str(tmp_path / "x.png")]
    assert compare.main(argv) == 2
    assert "--plot holds one table, not 2" in capsys.readouterr().err


def test_update_renews_what_stands_between_the_marks(file, tmp_path):
    path = file(pair())
    page = tmp_path / "page.md"
    page.write_text(
        f"before\n<!-- bench compare {path.name} -->\nold\n<!-- bench compare end -->\n"
        "after\n"
    )
    assert compare.main(["--update", str(page)]) == 0
    first = page.read_text()
    assert first.startswith("before\n") and first.endswith("-->\nafter\n")
    assert "old" not in first and "| M4 Max | 40 |" in first
    assert compare.main([f"--update={page}"]) == 0
    assert page.read_text() == first
    with pytest.raises(BenchError, match="no table to renew"):
        compare.renewed("no marks", tmp_path)


@pytest.mark.parametrize("name", ["README.md", "docs/comparison.md"])
def test_tables_in_the_documents_are_current(name):
    text = (ROOT / name).read_text("utf-8")
    assert compare.renewed(text, (ROOT / name).parent) == text, (
        f"renew it: python -m mlx_phase.bench compare --update {name}"
    )
    assert (ROOT / "docs" / "comparison.png").is_file()


def test_results_of_this_project_can_be_compared():
    files = sorted((ROOT / "bench" / "results").glob("*.jsonl"))
    found = tables(*files, "--each", "--published") if files else []
    for table in found:
        assert table.measured is not None and table.lines
        assert isinstance(show.as_json(table), dict)
