"""Published and predicted columns, the picture and the tables in the documents."""

import io
import sys
from pathlib import Path

import pytest
from compare_case import Files, one, pair, tables
from rich.console import Console

from mlx_phase import predict_fit
from mlx_phase.bench import BenchError, compare, compare_plot
from mlx_phase.bench import compare_show as show
from mlx_phase.bench.published import format_name, model_name, series
from mlx_phase.predict_data import published

ROOT = Path(__file__).parents[1]


@pytest.fixture
def file(tmp_path):
    return Files(tmp_path)


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


@pytest.mark.parametrize("width", [80, 150])
def test_a_terminal_cuts_nothing_off(width):
    out = io.StringIO()
    show.terminal(Console(file=out, width=width), one("--published", "--largest"))
    text = out.getvalue()
    assert "…" not in text and all(len(row) <= width for row in text.splitlines())
    for piece in (
        "M4 Max",
        "M1 Ultra",
        "83.1",
        "92.8",
        "0.152",
        "58 %",
        "decode",
        "prefill",
    ):
        assert piece in text
    assert ("(86.5–97.8)" in text) == (width == 150)


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
    with pytest.raises(BenchError, match=r"pip install matplotlib"):
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
