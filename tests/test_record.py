"""The row schema: validated on the way in and on the way out, append only."""

import json
from pathlib import Path

import pytest

from mlx_phase.bench import record

README = Path(__file__).parents[1] / "bench" / "README.md"
RESULTS = Path(__file__).parents[1] / "bench" / "results"


def row(**change):
    values = {
        "suite": "decode",
        "kernel": "qmv",
        "shape": "8192x28672",
        "M": 1,
        "dtype": "bfloat16",
        "bits": 4,
        "group": 64,
        "mode": "affine",
        "us": 46.5,
        "stock_us": 153.0,
        "ratio": 3.29,
        "repeats": 8,
        "delay_s": 0.0,
        "comparable": "yes",
        "executor": "cuda",
        "chip": "h200-132",
        "device": "NVIDIA H200",
        "os": "Linux",
        "mlx": "0.32.4",
        "mlx_phase": "0.1.0",
        "date": "2026-11-29T12:00:00+00:00",
    }
    return values | change


def test_rows_are_appended_and_read_back(tmp_path):
    path = tmp_path / "results" / "h200.jsonl"
    assert record.append(path, [record.row(**row())]) == 1
    assert record.append(path, [record.row(**row(M=2)), record.row(**row(M=4))]) == 2
    rows = record.read(path)
    assert [r["M"] for r in rows] == [1, 2, 4]
    assert set(rows[0]) == set(record.FIELDS)
    assert rows[0]["q_len"] is None and rows[0]["schema"] == record.SCHEMA


@pytest.mark.parametrize(
    "change, message",
    [
        ({"speed": 1}, "unknown field 'speed'"),
        ({"chip": None}, "'chip' is missing"),
        ({"M": "1"}, "'M' must be int, got '1'"),
        ({"M": True}, "'M' must be int, got True"),
        ({"us": float("nan")}, "'us' is nan"),
        ({"us": 0.0}, "'us' must be above 0"),
        ({"stock_us": -3.0}, "'stock_us' must be above 0"),
        ({"shape": "8192"}, "shape must be KxN"),
        ({"shape": "8192x0"}, "shape must be KxN"),
        ({"comparable": "no"}, "comparable must be"),
        ({"repeats": 2}, "2 repeats are not comparable"),
        ({"schema": 2}, "schema 2 is not 1"),
    ],
)
def test_bad_rows_are_refused(tmp_path, change, message):
    with pytest.raises(record.RecordError, match=message):
        record.row(**row(**change))
    # The same on reading: a file edited by hand can't slip through.
    path = tmp_path / "x.jsonl"
    good = json.dumps(record.row(**row()))
    path.write_text(f"{good}\n{json.dumps(record.row(**row()) | change)}\n")
    with pytest.raises(record.RecordError, match=f"x.jsonl:2: .*{message}"):
        record.read(path)


def test_two_repeats_are_fine_when_the_row_says_so():
    record.row(**row(repeats=2, comparable="not comparable: 2 repeats, 3 needed"))


def test_a_bad_row_leaves_the_file_as_it_was(tmp_path):
    path = tmp_path / "x.jsonl"
    record.append(path, [record.row(**row())])
    before = path.read_bytes()
    with pytest.raises(record.RecordError):
        record.append(path, [record.row(**row()), row(us="fast")])
    assert path.read_bytes() == before


@pytest.mark.parametrize("text", ["{", "[1]", "3"])
def test_lines_that_are_no_rows_are_named(tmp_path, text):
    path = tmp_path / "x.jsonl"
    path.write_text(f"\n{text}\n")
    with pytest.raises(record.RecordError, match=r"x.jsonl:2: "):
        record.read(path)


def test_readme_holds_the_schema():
    assert record.schema_table() in README.read_text("utf-8"), (
        "bench/README.md is out of date: print(record.schema_table())"
    )


def test_published_results_fit_the_schema():
    for path in sorted(RESULTS.glob("*.jsonl")):
        for values in record.read(path):
            assert values["chip"].startswith(path.stem.split("-")[0]), path
