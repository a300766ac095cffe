"""The prediction: its errors on chips left out, its bytes, its page, its command."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mlx_phase import predict_data, predict_fit, predict_table
from mlx_phase.chip import CHIPS, UNKNOWN, lookup
from mlx_phase.predict import Prediction, load_config, main, predict, predictable
from mlx_phase.predict_data import published, quantized, shapes_of
from mlx_phase.predict_fit import Case, fitted, left_out, select, summary

ROOT = Path(__file__).resolve().parents[1]
CACHED = (
    predict_fit._points,
    predict_fit.fitted,
    predict_fit.fitted_without,
    predict_fit.left_out,
    predict_fit.rows_with,
    predict_fit.spread,
)
LLAMA = shapes_of("Llama-3.1-8B", "4-bit")


@pytest.fixture
def fresh():
    """Caches emptied before and after, for tests that change the rows."""
    for function in CACHED:
        function.cache_clear()
    yield
    for function in CACHED:
        function.cache_clear()


def in_goal(row):
    return "#4167" in row.source or row.group == "MLX"


@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_the_goal_holds_on_chips_that_the_fit_did_not_see(phase):
    rows = select(left_out(phase), in_goal)
    assert len(rows) > 115
    names = {r.row.chip for r in rows}
    assert {"M1", "M2 Ultra", "M3 Max", "M4", "M5", "M5 Pro", "M5 Max"} <= names
    median, p90, _ = summary(rows)
    assert median <= 0.10 and p90 <= 0.20


def test_every_decode_row_of_4167_is_judged():
    rows = select(left_out("decode"), lambda r: "#4167" in r.source)
    wanted = [r for r in published() if "#4167" in r.source and r.decode_tok_s]
    assert len(rows) == len(wanted)


def test_a_left_out_chip_is_predicted_without_its_rows(fresh, monkeypatch):
    def of(name):
        rows = select(left_out("decode"), lambda r: r.chip == name)
        return [r.predicted_tok_s for r in rows]

    before, others = of("M2 Ultra"), of("M3 Ultra")
    changed = tuple(
        replace(r, decode_tok_s=r.decode_tok_s * 0.8) if r.chip == "M2 Ultra" else r
        for r in published()
    )
    monkeypatch.setattr(predict_fit, "published", lambda: changed)
    for function in CACHED:
        function.cache_clear()
    assert of("M2 Ultra") == before
    assert of("M3 Ultra") != others


def test_fit_finds_the_factors_and_shrugs_off_an_outlier():
    rng = np.random.default_rng(0)
    rows = [{"memory": b, "fixed": n} for b, n in rng.uniform(1, 9, (40, 2))]
    times = [1.2 * r["memory"] + 0.3 * r["fixed"] for r in rows]
    times[7] *= 3
    factors, loss = predict_fit.fit_terms(rows, times)
    assert factors["memory"] == pytest.approx(1.2, rel=0.02)
    assert factors["fixed"] == pytest.approx(0.3, rel=0.05)
    assert loss > 0


def test_fitted_numbers_are_physical():
    decode, prefill = fitted("decode"), fitted("prefill")
    assert all(v > 0 for v in (*decode.factors.values(), *prefill.factors.values()))
    # No more than the marketed bandwidth, no more than the peak.
    for name, value in {**decode.factors, **prefill.factors}.items():
        if name.startswith(("memory", "compute")):
            assert value > 1, name


def test_clock_is_the_one_of_the_chip_table():
    assert predict_fit.clock_ghz(lookup("m1-max")) == pytest.approx(1.296, rel=1e-3)
    assert predict_fit.clock_ghz(lookup("m5-max")) == pytest.approx(1.62, rel=1e-3)
    # Only a measured FP32 rate is known of the M6; its matrix rate implies more.
    assert predict_fit.clock_ghz(lookup("m6")) >= 1.59


def test_matrix_units_serve_new_chips_but_not_the_old_build():
    for name, group, served in [
        ("m5", "MLX", True),
        ("m5", "llama.cpp 2023", False),
        ("m4-max", "MLX", False),
    ]:
        case = Case(LLAMA, lookup(name), group, 512)
        assert ("compute, matrix units" in case.prefill_terms()) == served


def test_prediction_has_its_parts_and_an_interval():
    p = predict(LLAMA, lookup("m4-max"), prompt_tokens=512, context=576)
    assert p.low < p.decode_tok_s < p.high
    assert p.prefill_low < p.prefill_tok_s < p.prefill_high
    assert 1e3 / sum(p.decode_ms.values()) == pytest.approx(p.decode_tok_s)
    assert sum(p.prefill_ms.values()) == pytest.approx(p.first_token_ms)
    assert p.rows_of_chip > 0
    assert "predicted" in str(p)
    # Rows of that model on this chip do not exist; of a like one they do.
    mistral = predict(
        shapes_of("Mistral-7B-v0.3", "4-bit"), lookup("m4-max"), context=1024
    )
    assert mistral.low < 97.5 < mistral.high


def test_predictions_move_the_right_way():
    def decode(chip, **options) -> Prediction:
        return predict(LLAMA, lookup(chip), **options)

    chips = ["m4", "m4-pro", "m4-max-32", "m4-max-40"]
    speeds = [decode(name).decode_tok_s for name in chips]
    assert speeds == sorted(speeds)
    near, far = (decode("m4", context=c).decode_tok_s for c in (0, 2000))
    assert far < near
    old, new = (
        decode("m2-ultra", runtime=r).decode_tok_s for r in ("llama.cpp-2023", "mlx")
    )
    assert old < new


def test_what_is_extrapolated_is_said():
    seen = predict(LLAMA, lookup("m4-max"))
    assert seen.notes == LLAMA.notes
    ultra = predict(LLAMA, lookup("m5-ultra"), prompt_tokens=9000, context=9000)
    assert ultra.rows_of_chip == 0
    text = " ".join(ultra.notes)
    assert "Neural Accelerators" in text and "context beyond" in text
    assert "prompts were" in text
    assert "Apple7-8" in " ".join(predict(LLAMA, lookup("m2")).notes)


def test_all_mseries_chips_have_a_prediction_and_others_a_reason():
    for chip in CHIPS:
        if chip.family.startswith("Apple"):
            assert predict(LLAMA, chip).decode_tok_s > 0
        else:
            assert chip.name in predictable(chip)


@pytest.mark.parametrize(
    "chip, options, complaint",
    [
        (lookup("h100"), {}, "Apple's chips alone"),
        (UNKNOWN, {}, "Apple's chips alone"),
        (replace(lookup("m4-max"), bandwidth_gbs=None), {}, "not known"),
        (lookup("m4"), {"runtime": "vllm"}, "not one of mlx"),
        (lookup("m4"), {"prompt_tokens": 0}, "above 0"),
        (lookup("m4"), {"context": -1}, "not below"),
    ],
)
def test_bad_input_gets_one_clear_error(chip, options, complaint):
    with pytest.raises(ValueError, match=complaint):
        predict(LLAMA, chip, **options)


def test_intervals_hold_the_share_they_name():
    low, high = predict_fit.spread("decode", "MLX", 0.8)
    rows = select(left_out("decode"), lambda r: r.group == "MLX")
    ratios = [r.published_tok_s / r.predicted_tok_s for r in rows]
    inside = sum(low <= r <= high for r in ratios) / len(ratios)
    assert inside == pytest.approx(0.8, abs=0.05)
    wider = predict_fit.spread("decode", "MLX", 0.95)
    assert wider[0] < low and wider[1] > high


def test_the_page_is_up_to_date():
    page = (ROOT / "docs" / "prediction.md").read_text(encoding="utf-8")
    again = "python -m mlx_phase.predict --table > docs/prediction.md"
    assert page == predict_table.page(), f"run {again}"


def test_command_prints_predictions_as_such(capsys):
    assert main(["--model", "qwen3-8b", "--chip", "m4-max", "--chip", "m6"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("PREDICTED, not measured")
    assert "M4 Max (40 cores" in out and "M6 (12 cores, 170 GB/s) *" in out
    assert main(["--model", "qwen3-8b", "--chip", "m4-max", "--json"]) == 0
    row = json.loads(capsys.readouterr().out)
    assert row["kind"] == "prediction" and row["low"] < row["decode_tok_s"]
    assert main(["--model", "qwen3-8b"]) == 0
    lines = capsys.readouterr().out.splitlines()
    mseries = [c for c in CHIPS if c.family.startswith("Apple")]
    assert sum(" cores, " in line for line in lines) == len(mseries)


def test_table_is_the_page(capsys):
    assert main(["--table"]) == 0
    assert capsys.readouterr().out == predict_table.page()


def test_a_config_of_ones_own(tmp_path, capsys):
    config = quantized(predict_data.published_models()["Qwen3-4B"], "q6")
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load_config(str(tmp_path), None)["quantization"]["bits"] == 6
    assert load_config(str(tmp_path), "q8")["quantization"]["bits"] == 8
    assert main(["--model", str(tmp_path), "--chip", "m4"]) == 0
    assert "PREDICTED" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, complaint",
    [
        ([], "--model is missing"),
        (["--model", "qwen3-9b"], "Qwen3-8B"),
        (["--model", "Qwen3-8B", "--chip", "m9"], "unknown chip"),
        (["--model", "Qwen3-8B", "--chip", "h100"], "Apple's chips alone"),
        (["--model", "Qwen3-8B", "--prompt-tokens", "0"], "above 0"),
        (["--model", "{bad}"], "not a JSON file"),
        (["--model", "{list}"], "no JSON object"),
    ],
)
def test_command_errors_are_one_line(arguments, complaint, tmp_path, capsys):
    (tmp_path / "bad.json").write_text("{")
    (tmp_path / "list.json").write_text("[]")
    paths = {f"{{{n}}}": str(tmp_path / f"{n}.json") for n in ("bad", "list")}
    assert main([paths.get(a, a) for a in arguments]) == 2
    printed = capsys.readouterr()
    assert complaint in printed.err and printed.err.count("\n") == 1
    assert printed.out == ""
