"""Stored plans: what a file may hold, when it is believed, what patch does with it."""

import json
from dataclasses import asdict, replace

import cases
import mlx.core as mx
import mlx.nn as nn
import pytest
import tolerance
from hypothesis import given
from hypothesis import strategies as st
from tune_world import KEY, entry, plans, quantized

import mlx_phase
from mlx_phase import ops, tune, tune_store
from mlx_phase.launch.matmul import device_chip
from mlx_phase.plan import Plan, plan, plan_shared
from mlx_phase.problem import Matmul
from mlx_phase.tune_store import PlanFileError

ONE = (Matmul(1, 96, 128, "float32"),)
PAIR = (Matmul(1, 64, 128, "float32"), Matmul(1, 32, 128, "float32"))


def at(m, problems=ONE):
    return tuple(replace(p, M=m) for p in problems)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder for plans of this device."""
    monkeypatch.setenv("MLX_PHASE_PLANS", str(tmp_path))
    return tmp_path / tune_store.device_key().file


def store(path, *entries, **key):
    found = plans(*entries, key=replace(tune_store.device_key(), **key))
    tune_store.save(found, path)


def test_a_file_gives_back_what_was_saved(tmp_path):
    saved = plans(entry(ONE), entry(at(4), winner="stock", note="why"), entry(PAIR))
    path = tmp_path / "new" / "folder" / "p.json"
    tune_store.save(saved, path)
    read = tune_store.read(path)
    assert read.key == KEY and list(read) == list(saved)
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
    "has no 'mlx'": lambda data: data["key"].pop("mlx"),
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
    "accumulators": lambda d: d["entries"][1].update(rows=8),
    "no object": lambda data: data["entries"].append(None),
}


def broken(how):
    data = json.loads(tune_store.to_json(plans(entry(ONE), entry(at(4)))))
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


def test_half_written_files_never_break_patch(here):
    store(here, entry(ONE))
    text = here.read_bytes()
    model = quantized()
    for size in (0, 1, len(text) // 3, len(text) - 3):
        here.write_bytes(text[:size])
        report = mlx_phase.patch(model, check=False)
        assert report.n_replaced == 1 and "cannot be read" in report.tune
        assert any(here.name in note and "tune again" in note for note in report.notes)
        assert ops.choose(ONE) == plan(ONE[0], device_chip())
        mlx_phase.unpatch(model)
    here.write_bytes(b"\xff\xfe")
    assert "cannot be read" in mlx_phase.patch(model, check=False).tune
    here.unlink()
    here.mkdir()
    assert "cannot be read" in mlx_phase.patch(model, check=False).tune


def test_patch_says_what_was_loaded(here, monkeypatch):
    model = quantized()
    assert "no plan stored" in mlx_phase.patch(model, check=False).tune
    store(here, entry(ONE), entry(at(4), winner="stock"))
    report = mlx_phase.patch(model, check=False)
    assert report.tune == f"stored plan {here.name}: 1 races won, 1 to stock"
    assert report.to_dict()["tune"] == report.tune
    assert mlx_phase.patch(model, check=False, tune="off").tune == "off"
    here.rename(here.with_name("m9-80.json"))
    assert f"no plan stored for {here.stem}" in mlx_phase.patch(model).tune


@pytest.mark.parametrize("field", ["os", "mlx", "kernels", "arch"])
def test_a_plan_made_elsewhere_is_not_used_and_says_why(here, field):
    store(here, entry(ONE, rows=1), **{field: "other"})
    report = mlx_phase.patch(quantized(), check=False)
    assert "not used" in report.tune and f"{field} 'other', here" in report.tune
    assert ops.choose(ONE) == plan(ONE[0], device_chip())


def test_another_kernel_text_is_another_key(monkeypatch):
    before = tune_store.kernels_hash()
    real = tune_store.source.load
    tune_store.kernels_hash.cache_clear()
    monkeypatch.setattr(
        tune_store.source, "load", lambda k: replace(real(k), body=real(k).body + ";")
    )
    try:
        assert tune_store.kernels_hash() != before
    finally:
        tune_store.kernels_hash.cache_clear()


def served(model, m=1):
    ops.reset_served()
    mx.eval(model(cases.activations(m, 128)))
    return ops.served()


def test_layers_run_the_stored_tile_and_a_new_plan_reaches_bound_layers(here):
    model, other = quantized(), quantized()
    store(here, entry(ONE, rows=1, simdgroups=4))
    assert mlx_phase.patch(model).failed == []
    mlx_phase.patch(other)
    for layer in (model, other):
        (name,) = served(layer).kernels
        assert "R=1 SG=4" in name
    store(here, entry(ONE, rows=2))
    mlx_phase.patch(model)
    for layer in (model, other):
        assert "R=2 SG=2" in next(iter(served(layer).kernels))
    mlx_phase.patch(model, tune="off")
    assert "R=4" in next(iter(served(other).kernels))


def test_stock_serves_what_it_won_and_says_so(here):
    model, stock = quantized(), quantized()
    store(here, entry(ONE, winner="stock"), entry(at(4), winner="stock"))
    report = mlx_phase.patch(model)
    assert report.kernels == [] and "128x96 goes on stock" in str(report.notes)
    (reason,) = served(model).stock
    assert "stock wins: tuned at M = 1: 40.0 us, stock 20.0 us" in reason
    x = cases.activations(1, 128)
    assert mx.array_equal(model(x), stock(x))
    # Above all raced M the table decides.
    assert served(model, 5).kernels


def test_exact_keeps_a_shape_on_one_side(here):
    model = quantized()
    store(here, entry(ONE, winner="stock"), entry(at(4)))
    report = mlx_phase.patch(model, check=False)
    assert "exact=False" in str(report.notes) and served(model, 1).kernels
    mlx_phase.patch(model, check=False, exact=False)
    assert served(model, 1).stock and served(model, 3).kernels


def test_rows_stay_exact_under_a_stored_split(here):
    layer = quantized(64, 4096)
    problems = (Matmul(1, 64, 4096, "float32"),)
    split = {"split": (2, 3), "simdgroups": 2}
    store(here, entry(problems, **split), entry(at(3, problems), rows=1, **split))
    mlx_phase.patch(layer)
    x = cases.activations(4, 4096)
    rows = [layer(x[m : m + 1]) for m in range(4)]
    for m in (3, 4):
        for i in range(m):
            tolerance.assert_bits(layer(x[:m])[i : i + 1], rows[i])
    names = ops.served().kernels
    assert len(names) == 3 and all("KS=2 SPLITS=3" in name for name in names)


class Attention(nn.Module):
    """Two projections that read the same x."""

    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj = quantized(64), quantized(32)

    def __call__(self, x):
        return self.gate_proj(x), self.up_proj(x)


def test_a_shared_launch_that_lost_is_not_made(here):
    model = Attention()
    assert mlx_phase.patch(model).shared
    mlx_phase.unpatch(model)
    store(here, entry(PAIR, winner="stock"))
    report = mlx_phase.patch(model)
    assert not report.shared and "goes apart" in str(report.notes)
    assert list(report.launches) == [PAIR[:1], PAIR[1:]]
    assert not any(name.startswith("qmv_pair") for name in served(model).kernels)


def test_a_shared_launch_runs_its_stored_tile(here):
    model = Attention()
    store(here, entry(PAIR, rows=1))
    report = mlx_phase.patch(model)
    assert report.launches == {PAIR: 1}
    (name,) = served(model).kernels
    assert name.startswith("qmv_pair") and "R=1" in name
    ys = model(cases.activations(1, 128))
    for y, stock in zip(ys, (quantized(64), quantized(32)), strict=True):
        assert mx.allclose(y, stock(cases.activations(1, 128)), atol=1e-4)


@pytest.mark.parametrize("m, tile", [(1, 1), (2, 2), (4, 2), (5, None)])
def test_m_between_raced_ones_takes_the_next_larger(m, tile):
    # Above all of them the table's tile stays, with the split of the shape.
    split = {"split": (2, 1), "simdgroups": 4}
    found = plans(entry(ONE, rows=1, **split), entry(at(4), rows=2, **split))
    p = found.decide(at(m), exact=True)
    base = plan(at(m)[0], device_chip())
    assert (p.k_simdgroups, p.splits) == (2, 1)
    assert p.rows == (tile or base.rows) and p.simdgroups == (4 if tile else 2)
    assert isinstance(p, Plan) and found.decide(at(m, PAIR), exact=True) is None


def test_plans_of_several_matrices_keep_their_kernel():
    p = plans(entry(PAIR, rows=1)).decide(PAIR, exact=True)
    assert (p.kernel, p.rows) == ("qmv_pair", 1)
    assert p.splits == plan_shared(PAIR, device_chip()).splits == 1


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
    assert "imported 1 races" in out and "128x64 + 128x32" in out.replace("\n", " ")


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
