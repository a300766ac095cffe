"""Files of stored plans: what they may hold, how they are written and shared."""

import json
from dataclasses import asdict, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from tune_world import KEY, at, entry, plans, store

from mlx_phase import tune, tune_store, tune_table
from mlx_phase.problem import Matmul
from mlx_phase.tune_store import PlanFileError

ONE = (Matmul(1, 96, 128, "float32"),)
PAIR = (Matmul(1, 64, 128, "float32"), Matmul(1, 32, 128, "float32"))


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Where a plan of this device is looked for."""
    monkeypatch.setenv("MLX_PHASE_PLANS", str(tmp_path))
    return tmp_path / tune_store.device_key().file


def test_a_file_gives_back_what_was_saved(tmp_path, capsys):
    saved = plans(
        entry(ONE), entry(at(ONE, 4), winner="stock", note="[/why]"), entry(PAIR)
    )
    path = tmp_path / "new" / "folder" / "p.json"
    tune_store.save(saved, path)
    read = tune_store.read(path)
    assert read.key == KEY and list(read) == list(saved)
    Console(width=200).print(tune_table.table(read))
    assert "stock ([/why])" in capsys.readouterr().out
    assert [p.name for p in path.parent.iterdir()] == ["p.json"]


def test_a_write_that_fails_leaves_the_old_file_and_no_litter(tmp_path, monkeypatch):
    path = tmp_path / "p.json"
    tune_store.save(plans(entry(ONE)), path)
    old = path.read_text()

    def full(*args):
        raise OSError("disk full")

    monkeypatch.setattr(tune_store.os, "fsync", full)
    with pytest.raises(OSError, match="disk full"):
        tune_store.save(plans(entry(PAIR)), path)
    assert path.read_text() == old and len(list(tmp_path.iterdir())) == 1


def change(**values):
    return lambda data: data["entries"][0].update(values)


BROKEN = {
    "not JSON": lambda data: "{",
    "has no list": lambda data: data.update(entries={}),
    "schema 2": lambda data: data.update(schema=2),
    "key is no object": lambda data: data.update(key=None),
    "has no 'mlx'": lambda data: data["key"].pop("mlx") and None,
    "gpu_cores is '8'": lambda data: data["key"].update(gpu_cores="8"),
    "entry 0 has no 'rows'": lambda data: data["entries"][0].pop("rows"),
    "rows is True": change(rows=True),
    "rows = 3": change(rows=3),
    "rows = 1000000": change(rows=10**6),
    "simdgroups = 0": change(simdgroups=0),
    "cannot share K": change(simdgroups=2, k_simdgroups=4),
    "splits = 0": change(splits=0),
    "splits = 99": change(splits=99),
    "winner is 'me'": change(winner="me"),
    "us is": change(us="fast"),
    "above 0": change(us=-1.0),
    "problems must be": change(problems=[]),
    "a problem is no object": change(problems=[7]),
    "no multiple|multiple of": lambda d: d["entries"][0]["problems"][0].update(K=100),
    "two ways": lambda d: d["entries"][1].update(k_simdgroups=2, simdgroups=2),
    "accumulators": lambda d: (
        d["entries"][1]["problems"][0].update(M=5) or d["entries"][1].update(rows=8)
    ),
    "no object": lambda data: data["entries"].append(None),
}


def broken(how):
    data = json.loads(tune_store.to_json(plans(entry(ONE), entry(at(ONE, 4)))))
    text = BROKEN[how](data)
    return text if isinstance(text, str) else json.dumps(data)


@pytest.mark.parametrize("how", BROKEN)
def test_bad_files_are_refused_with_the_reason(how):
    with pytest.raises(PlanFileError, match=how):
        tune_store.parse(broken(how))


@pytest.mark.parametrize("text", ["", "null", "[]", "[" * 10**5, '{"schema": 1e999}'])
def test_any_text_is_refused_in_words(text):
    with pytest.raises(PlanFileError):
        tune_store.parse(text)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)


@given(field=st.sampled_from(sorted(asdict(entry(ONE)))), value=json_values)
def test_no_value_of_a_field_gets_past_the_limits_or_crashes(field, value):
    data = json.loads(tune_store.to_json(plans(entry(ONE))))
    data["entries"][0][field] = value
    try:
        (read,) = tune_store.parse(json.dumps(data))
    except PlanFileError:
        return
    assert 1 <= read.rows <= 8 and 32 * read.simdgroups <= 256 and read.us > 0


@pytest.mark.parametrize("changed", [False, True])
def test_another_kernel_text_is_another_key(monkeypatch, changed):
    before = tune_store.kernels_hash()
    real = tune_store.source.load
    tune_store.kernels_hash.cache_clear()

    def load(kernel: str, lean: bool = False):
        text = real(kernel, lean=lean)
        return replace(text, body=text.body + ";") if lean == changed else text

    monkeypatch.setattr(tune_store.source, "load", load)
    try:
        assert tune_store.kernels_hash() != before
    finally:
        tune_store.kernels_hash.cache_clear()


def test_export_and_import(here, tmp_path, capsys):
    store(here, entry(ONE, rows=1))
    file = tmp_path / "out" / "mine.json"
    assert tune.main(["--export", str(file)]) == 0
    store(here, entry(ONE), entry(PAIR))
    assert tune.main(["--import", str(file)]) == 0
    read = tune_store.read(here)
    assert read.get(ONE).rows == 1 and read.get(PAIR) is not None
    assert tune.main(["--show"]) == 0
    out = capsys.readouterr().out
    assert "imported 1 races" in out and "R=2 SG=2" in out


def test_import_refuses_what_was_made_elsewhere_or_is_broken(here, tmp_path, capsys):
    file = tmp_path / "out.json"
    tune_store.save(plans(entry(ONE), key=replace(KEY, mlx="9.9")), file)
    assert tune.main(["--import", str(file)]) == 2
    err = capsys.readouterr().err
    assert "made elsewhere" in err and "mlx '9.9', here" in err and "sm_90" in err
    file.write_text(broken("rows = 3"))
    assert tune.main(["--import", str(file)]) == 2
    assert "rows = 3" in capsys.readouterr().err
    assert not here.exists()
