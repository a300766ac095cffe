"""What `patch` does with stored plans: tiles, stock, exact rows, plans that change."""

import cases
import mlx.core as mx
import mlx.nn as nn
import pytest
import tolerance
from tune_world import at, entry, plans, quantized, store

import mlx_phase
from mlx_phase import ops, tune_store
from mlx_phase.launch.matmul import device_chip
from mlx_phase.plan import Plan, plan, plan_shared
from mlx_phase.problem import Matmul

ONE = (Matmul(1, 96, 128, "float32"),)
PAIR = (Matmul(1, 64, 128, "float32"), Matmul(1, 32, 128, "float32"))


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Where a plan of this device is looked for."""
    monkeypatch.setenv("MLX_PHASE_PLANS", str(tmp_path))
    return tmp_path / tune_store.device_key().file


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
    store(here, entry(ONE), entry(at(ONE, 4), winner="stock"))
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
    store(here, entry(ONE, winner="stock"), entry(at(ONE, 4), winner="stock"))
    report = mlx_phase.patch(model)
    assert report.kernels == [] and "128x96 goes on stock" in str(report.notes)
    (reason,) = served(model).stock
    assert "stock wins: tuned at M = 1: 40.0 us, stock 20.0 us" in reason
    x = cases.activations(1, 128)
    assert mx.array_equal(model(x), stock(x))
    # Above all raced M: stock for all or for none, unless rows need not be exact.
    (reason,) = served(model, 5).stock
    assert "stock wins for every M that was raced" in reason
    mlx_phase.patch(model, exact=False)
    assert served(model, 5).kernels


def test_exact_keeps_a_shape_on_one_side(here):
    model = quantized()
    store(here, entry(ONE, winner="stock"), entry(at(ONE, 4)))
    report = mlx_phase.patch(model, check=False)
    assert "exact=False" in str(report.notes) and served(model, 1).kernels
    mlx_phase.patch(model, check=False, exact=False)
    assert served(model, 1).stock and served(model, 3).kernels


def test_rows_stay_exact_under_a_stored_split(here):
    layer = quantized(64, 4096)
    problems = (Matmul(1, 64, 4096, "float32"),)
    split = {"split": (2, 3), "simdgroups": 2}
    store(here, entry(problems, **split), entry(at(problems, 3), rows=1, **split))
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
    found = plans(entry(ONE, rows=1, **split), entry(at(ONE, 4), rows=2, **split))
    p = found.decide(at(ONE, m), exact=True)
    base = plan(at(ONE, m)[0], device_chip())
    assert (p.k_simdgroups, p.splits) == (2, 1)
    assert p.rows == (tile or base.rows)
    assert p.simdgroups == (4 if tile else base.simdgroups)
    assert isinstance(p, Plan) and found.decide(at(PAIR, m), exact=True) is None


def test_plans_of_several_matrices_keep_their_kernel():
    p = plans(entry(PAIR, rows=1)).decide(PAIR, exact=True)
    assert (p.kernel, p.rows) == ("qmv_pair", 1)
    assert p.splits == plan_shared(PAIR, device_chip()).splits == 1


def test_a_layer_bound_while_its_kernel_was_off_runs_it_when_it_is_on():
    model = quantized()
    mlx_phase.patch(model, check=False)
    (name,) = served(model).kernels
    mlx_phase.unpatch(model)
    ops.disable(name, "planted")
    mlx_phase.patch(model, check=False)
    assert served(model).stock
    ops.enable_all()
    assert served(model).kernels == {name: 1}
