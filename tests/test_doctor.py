"""The doctor: every row of the plan, failures it must see, what it reads and says."""

import json
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from tune_world import at, entry, store

from mlx_phase import (
    check,
    doctor,
    doctor_fused,
    doctor_kernels,
    doctor_machine,
    tune_store,
)
from mlx_phase.bench.device import environment
from mlx_phase.bench.measure import NoiseError
from mlx_phase.doctor_kernels import Row, examine, rows
from mlx_phase.executor import ExecutorError
from mlx_phase.launch.matmul import device_chip, narrow_loads
from mlx_phase.plan import plan
from mlx_phase.problem import AFFINE_BITS, AFFINE_GROUPS, FP_MODES, Matmul
from mlx_phase.source import KERNELS


@pytest.fixture(autouse=True)
def clean_results():
    check.forget()
    yield
    check.forget()


def row(m=4, **values):
    one = Matmul(1, 96, 128, "float32", **values)
    many = replace(one, M=m)
    chip = device_chip()
    return Row((one,), (many,), plan(one, chip), plan(many, chip))


@pytest.mark.parametrize("quick", [True, False])
def test_rows_reach_every_kernel_format_dtype_and_tile(quick):
    found = rows(quick)
    firsts = [r.one[0] for r in found]
    kernels = {r.plan_many.kernel for r in found}
    kernels |= {"qmv_reduce" for r in found if r.plan_many.splits > 1}
    kernels |= {row.kernel for row in doctor_fused.rows(quick)}
    # See test_doctor_attention, test_doctor_experts, test_small_m, test_qmm_codes,
    # test_qmm_plan.
    others = ("sdpa", "qmm", "gather")
    assert kernels == {name for name in KERNELS if not name.startswith(others)}
    assert {p.bits for p in firsts if p.mode == "affine"} == set(AFFINE_BITS)
    assert {p.group_size for p in firsts if p.mode == "affine"} == set(AFFINE_GROUPS)
    assert {p.mode for p in firsts} == {"affine", "none", *FP_MODES}
    for mode in ("affine", "none"):
        dtypes = {p.x_dtype for p in firsts if p.mode == mode}
        assert dtypes == {"float16", "bfloat16", "float32"}
    assert {r.plan_many.rows for r in found} == {1, 2, 4}
    assert all(r.one == at(r.many, 1) for r in found)
    # Exact rows: the two plans of a row add in the same order.
    for r in found:
        one, many = r.plan_one, r.plan_many
        assert (one.k_simdgroups, one.splits) == (many.k_simdgroups, many.splits)
    assert len(found) < 20 if quick else len(found) > 150


def test_full_rows_are_the_product_of_formats_dtypes_and_tiles():
    found = {
        (r.one[0].bits, r.one[0].group_size, r.one[0].x_dtype, r.many[0].M)
        for r in rows(False)
        if r.one[0].mode == "affine" and len(r.one) == 1
    }
    assert len(found) >= len(AFFINE_BITS) * len(AFFINE_GROUPS) * 3 * 3


def test_a_row_is_timed_checked_and_exact():
    ticks = iter([1.0, 1.5])
    found = examine(row(), clock=lambda: next(ticks))
    assert found.ok and found.exact is True and found.error is None
    assert found.run_ms == pytest.approx(500) and found.first_ms > 0
    assert 0 < found.worst < 1 and "M=4" in found.kernel


def test_rows_with_other_bits_are_found(monkeypatch):
    real = doctor_kernels.evaluate

    def other(problems, p, x, arrays):
        tiny = np.float32(1 + 1e-6 * (problems[0].M > 1))
        return [out * tiny for out in real(problems, p, x, arrays)]

    monkeypatch.setattr(doctor_kernels, "evaluate", other)
    found = examine(row())
    assert found.exact is False and not found.ok
    assert "rows of M = 4 have other bits than alone" in found.error


@pytest.mark.parametrize("where", ["check", "doctor_kernels"])
def test_a_kernel_that_does_not_run_is_found(where, monkeypatch):
    def refuse(*args):
        raise ExecutorError("planted: does not compile")

    module = {"check": check, "doctor_kernels": doctor_kernels}[where]
    monkeypatch.setattr(module, "evaluate", refuse)
    found = examine(row())
    assert not found.ok and "planted" in found.error and found.exact is None


def diagnose(monkeypatch, *todo, model=None):
    monkeypatch.setattr(doctor, "rows", lambda quick: list(todo))
    return doctor.diagnose(environment(), True, model, todo=doctor.rows)


def test_the_block_has_the_facts_and_the_exit_status_tells(monkeypatch, capsys):
    def todo(env, quick, model):
        return diagnose_real(env, quick, model, todo=lambda quick: [row()])

    diagnose_real = doctor.diagnose
    monkeypatch.setattr(doctor, "diagnose", todo)
    assert doctor.main([]) == 0
    out = capsys.readouterr().out
    assert out.startswith("```text\n") and out.rstrip().endswith("```")
    for text in ("executor        cpu", f"mlx             {mx.__version__}"):
        assert text in out
    assert "metal language  3.1" in out and "no plan stored" in out
    assert "emulation" in out and "1 of 1 rows of the plan passed" in out
    monkeypatch.setattr(check, "compare", lambda *a: 2.0)
    check.forget()
    assert doctor.main([]) == 1
    out = capsys.readouterr().out
    assert "FAILED: qmv affine" in out and "0 of 1 rows" in out
    assert doctor.main(["--json"]) == 1
    data = json.loads(capsys.readouterr().out)
    assert data["ok"] is False and data["schema"] == 1 and len(data["problems"]) == 1
    assert data["machine"]["executor"] == "cpu" and data["kernels"][0]["worst"] == 2.0


def test_a_kernel_that_fails_is_still_json(monkeypatch):
    monkeypatch.setattr(check, "compare", lambda *a: float("inf"))
    found = diagnose(monkeypatch, row())
    text = json.dumps(found.to_dict(), allow_nan=False)
    assert json.loads(text)["kernels"][0]["worst"] is None
    assert "inf" in doctor.block(found)


@pytest.mark.parametrize("narrow, said", [(False, "on"), (True, "off: ")])
def test_vector_loads_that_the_check_switched_off_are_said(narrow, said, monkeypatch):
    before = narrow_loads(narrow)
    try:
        found = diagnose(monkeypatch)
        assert found.machine["vector_loads"].startswith(said)
        assert narrow_loads(False) is narrow  # as it was
    finally:
        narrow_loads(before)


def test_host_times_of_a_gpu(monkeypatch):
    row = {"build_us": 2.8, "eval_us": 6.9, "stock_build_us": 1.3}
    env = replace(environment(), executor="apple")
    monkeypatch.setattr(doctor, "facts", lambda env: {})
    monkeypatch.setattr(
        doctor, "host_case", lambda *a: row | {"stock_eval_us": 4.8, "us": 9.7}
    )
    found = doctor.diagnose(env, True, todo=lambda quick: [])
    assert found.host == row | {"stock_eval_us": 4.8}
    assert "2.8 us to build a launch, 6.9 us to evaluate it" in doctor.block(found)

    def noisy(*args):
        raise NoiseError("too noisy")

    monkeypatch.setattr(doctor, "host_case", noisy)
    found = doctor.diagnose(env, True, todo=lambda quick: [])
    assert found.host is None and found.warnings == ["no host times: too noisy"]
    assert "not measured" in doctor.block(found)


def test_bad_input(capsys):
    assert doctor.main(["--model", "nonsense"]) == 2
    assert "unknown model" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        doctor.main(["--quick", "--full"])


def test_the_cpu_is_quick_unless_asked(monkeypatch):
    asked = []

    class Stop(Exception):
        pass

    def note(env, quick, model):
        asked.append(quick)
        raise Stop

    monkeypatch.setattr(doctor, "diagnose", note)
    for options in ([], ["--full"], ["--quick"]):
        with pytest.raises(Stop):
            doctor.main(options)
    assert asked == [True, False, True]


def test_a_model_has_its_size_and_its_own_launches_checked(monkeypatch):
    found = diagnose(monkeypatch, model="tiny:layers=1")
    assert found.model["gb"] > 0 and found.model["layers_left"] == 0
    names = [k.kernel.split()[0] for k in found.kernels]
    assert sorted(names) == ["qmv", "qmv_pair", "qmv_triple"]
    assert all(k.ok and k.exact for k in found.kernels)
    assert "tiny:layers=1 (synthetic" in doctor.block(found)


def test_a_model_over_the_limit_is_a_warning(monkeypatch):
    monkeypatch.setattr(doctor_machine, "wired_limit_gb", lambda info: 0.0001)
    found = diagnose(monkeypatch, model="tiny:layers=1")
    assert any("paged" in text for text in found.warnings) and not found.problems


def test_the_rows_of_a_stored_plan_are_checked(monkeypatch, tmp_path):
    monkeypatch.setenv("MLX_PHASE_PLANS", str(tmp_path))
    path = tmp_path / tune_store.device_key().file
    one = (Matmul(1, 96, 128, "float32"),)
    store(path, entry(one, rows=1), entry(at(one, 2), rows=1, simdgroups=4))
    found = diagnose(monkeypatch)
    assert "2 races won" in found.plans
    tiles = [k.kernel.split("g64 float32 ")[1] for k in found.kernels]
    assert tiles == [f"M={m} R=1 SG={sg} KS=1 SPLITS=1" for m, sg in ((1, 2), (2, 4))]
    path.write_text("{")
    assert any("cannot" in w or "not used" in w for w in diagnose(monkeypatch).warnings)


PMSET = {
    "-g": "System-wide power settings:\n lowpowermode         1\n sleep 1\n",
    "batt": "Now drawing from 'Battery Power'\n -InternalBattery-0 80%;\n",
    "therm": "Note: No thermal warning level has been recorded\n",
}


def test_power_and_heat_of_a_mac():
    def run(command):
        return PMSET[command[-1]]

    assert doctor_machine.power(run, "Darwin") == "low power, Battery Power"
    assert doctor_machine.thermal(run, "Darwin") == "no warning recorded"
    hot = "CPU_Scheduler_Limit \t= 100\n CPU_Speed_Limit \t= 58\n"
    assert doctor_machine.thermal(lambda c: hot, "Darwin") == "CPU_Speed_Limit 58"
    assert doctor_machine.power(lambda c: None, "Darwin") is None
    assert doctor_machine.thermal(lambda c: None, "Darwin") is None


def test_power_and_heat_on_linux(tmp_path, monkeypatch):
    row = "1980 MHz, 1980 MHz, 31, 77.20 W, 700.00 W\n"
    text = doctor_machine.thermal(lambda command: row, "Linux")
    assert text == "1980 MHz of 1980 MHz, 31 C, 77.20 W of 700.00 W"
    assert doctor_machine.thermal(lambda command: "error", "Linux") is None
    governor = tmp_path / "governor"
    monkeypatch.setattr(doctor_machine, "GOVERNOR", governor)
    assert doctor_machine.power(system="Linux") is None
    governor.write_text("powersave\n")
    assert doctor_machine.power(system="Linux") == "governor powersave"


def test_folders_of_the_user_stay_private(monkeypatch):
    monkeypatch.setenv("MLX_PHASE_PLANS", "/home/jane/plans")
    monkeypatch.setenv("MLX_PHASE_PRINT_PLANS", "1")
    monkeypatch.setenv("SECRET_TOKEN", "hush")
    text = doctor_machine.variables()
    assert "MLX_PHASE_PLANS=(a path)" in text and "MLX_PHASE_PRINT_PLANS=1" in text
    assert "jane" not in text and "hush" not in text
