"""The report: its numbers against plan and step, its forms, its inputs."""

import json
from pathlib import Path

import pytest
from report_case import MOE, analysis

from mlx_phase import step
from mlx_phase.chip import lookup
from mlx_phase.launch.matmul import device_chip
from mlx_phase.report import checklist, serving, verdict
from mlx_phase.report.__main__ import main, sections


def text(section):
    return " ".join(
        line for b in section.blocks for line in getattr(b, "items", ())
    )  # fmt: skip


def report(capsys, *argv):
    assert main(argv) == 0
    return capsys.readouterr().out


def test_chunks_keep_the_latency():
    a = analysis(chip="m5-max", batch=4)
    choice, lines = serving.strategy(a)
    chunk = serving.largest_chunk(a)
    assert choice == "chunked" and f"{chunk} tokens at most" in lines[0]
    assert chunk % 64 == 0
    assert serving.stall(a, chunk) <= 0.1 < serving.stall(a, chunk + 64)


@pytest.mark.parametrize(
    "options, why",
    [
        ({"batch": 1}, "one request"),
        ({"batch": 4, "itl_ms": 1e5}, "within the 100000 ms"),
        ({"batch": 4, "itl_ms": 1}, "another queue"),
    ],
)
def test_separate_where_chunks_do_not_help(options, why):
    choice, lines = serving.strategy(analysis(**options))
    assert choice == "separate" and why in lines[0]


def test_small_chunks_read_the_weights_again():
    a = analysis("llama-8b:bits=16", "h100-sxm", batch=4, itl_ms=9.5)
    choice, lines = serving.strategy(a)
    assert choice == "chunked" and "reading the weights again" in lines[1]
    small, large = a.chunked_seconds(64), a.chunked_seconds(512)
    assert small > 4 * large and a.knee_rows == 462


def test_batch_gain_with_and_without_the_cache():
    a = analysis("llama-8b:bits=16", "h100-sxm", context=2000)
    tables = {b.name: b.records for b in serving.batching(a).blocks[1:]}
    last = tables["batches"][-1]
    assert last["batch"] == 64
    # The 32 of the text counts the whole embedding table; a step reads one row of it.
    assert last["gain"] == pytest.approx(30.4, abs=0.1)
    assert 60 < last["gain_without_cache"] < 64


def test_speculation_has_the_break_even_of_the_cost_curve():
    a = analysis(draft=6, draft_cost=0.2)
    records = {r["drafted"]: r for r in serving.drafts(a)}
    six = records[6]
    assert six["cost_ratio"] == a.cost_ratio(7) >= 1
    assert six["break_even"] == step.break_even(six["cost_ratio"], 6, 0.2)
    assert six["exact"] and not records[31]["exact"]
    assert not serving.drafts(analysis(MOE))[0]["exact"]
    # With experts, more rows reach more of them.
    assert analysis(MOE).cost_ratio(5) > 2 > analysis().cost_ratio(5)


def test_published_curves_are_named_as_such():
    section = serving.speculation(analysis())
    assert "Published, llama.cpp" in text(section)
    assert "M = 8 costs 7.44x (break-even 98%)" in text(section)


def test_no_speculation_leaves_its_phase_out():
    a = analysis(draft=0)
    assert [name for name, _ in a.phases] == ["prefill", "decode"]
    (answer,) = (r for r in checklist.answers(a) if r["number"] == 8)
    assert "no speculation" in answer["why"]


def test_flips_give_the_numbers_of_step():
    a = analysis(batch=2)
    found = " ".join(verdict.flips(a))
    assert f"from {step.kv_crossover(a.shapes, a.chip, 2)} cached tokens" in found
    assert f"from {step.attention_crossover(a.shapes)} tokens attention" in found
    assert f"from M = {a.knee_rows}" in found and "from 8 drafted tokens" in found


def test_checklist_answers_every_line():
    found = checklist.answers(analysis())
    assert [r["number"] for r in found] == list(range(1, 13))
    assert all(r["answer"] in ("yes", "in part", "no") and r["why"] for r in found)
    split = next(r for r in found if r["number"] == 4)
    assert split["answer"] == "yes" and "merged in order" in split["why"]
    many = {r["number"]: r for r in checklist.answers(analysis(batch=64))}
    assert many[3]["answer"] == "yes" and "in each tile" in many[11]["why"]
    many = checklist.answers(analysis(chip="m5-max", batch=64))
    assert many[2]["answer"] == "no" and "neural accelerators" in many[2]["why"]


def test_an_unknown_chip_gets_no_times():
    a = analysis(chip="cpu")
    assert a.decode.seconds is None and a.knee_rows is None
    found = sections(a)
    assert len(found) == 8 and "not known" in text(found[1])
    answers = {r["number"]: r["answer"] for r in checklist.answers(a)}
    assert answers[9] == "no" and answers[2] == "in part"


def test_forms_have_the_same_sections(capsys):
    argv = ("--model", "llama-8b", "--chip", "m4-max")
    plain, mark = report(capsys, *argv), report(capsys, *argv, "--markdown")
    data = json.loads(report(capsys, *argv, "--json"))
    titles = [s["title"] for s in data["sections"]]
    assert len(titles) == 8 and titles[0].startswith("1. Phase")
    for title in titles:
        assert title in plain and f"## {title}" in mark
    assert "Predicted, not measured" in plain and "not predictions" in plain
    roofline = data["sections"][1]["tables"]["roofline"]
    (whole,) = (
        r for r in roofline if r["phase"] == "decode" and r["operation"] == "all"
    )
    a = analysis()
    assert whole["bytes"] == a.decode.bytes
    assert whole["us"] == pytest.approx(a.decode.seconds * 1e6)
    assert sum(r["share"] for r in roofline if r["phase"] == "decode") == pytest.approx(
        2
    )


def test_markdown_tables_are_whole(capsys):
    out = report(capsys, "--model", "tiny", "--chip", "m1", "--markdown")
    lines = out.splitlines()
    for above, line in zip(lines, lines[1:], strict=False):
        if above.startswith("|") and line.startswith("|"):
            assert above.count("|") == line.count("|")
    assert "<" not in out


def test_a_machine_without_a_gpu_shows_a_stand_in_and_says_so(capsys, monkeypatch):
    monkeypatch.setattr("mlx_phase.report.__main__.device_chip", lambda: lookup("cpu"))
    for form in ((), ("--markdown",), ("--json",), ("--checklist",)):
        out = report(capsys, "--model", "tiny", *form)
        assert "no known bandwidth: shown for m4-max-40" in out


@pytest.mark.parametrize(
    "argv, complaint",
    [
        (("--model", "tiny", "--chip", "m9-max"), "did you mean"),
        (("--model", "no-such-model"), "no such folder or file"),
        (("--model", "tiny:bits=9"), "bits=9"),
    ],
)
def test_bad_input_is_one_line(capsys, argv, complaint):
    assert main(argv) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and complaint in err


def test_an_executor_that_is_not_there_is_one_line(capsys, monkeypatch):
    monkeypatch.setenv("MLX_PHASE_EXECUTOR", "gpu")
    # It is asked once a process.
    asked = device_chip.__wrapped__
    monkeypatch.setattr("mlx_phase.report.__main__.device_chip", asked)
    assert main(["--model", "tiny"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "use one of apple, cuda, cpu" in err


def test_the_report_in_the_readme_is_what_the_command_prints(capsys):
    readme = Path(__file__).parents[1] / "README.md"
    found = readme.read_text(encoding="utf-8").split("<!-- report -->")[1]
    block = found.split("<!-- report end -->")[0].strip().strip("`").strip()
    command, _, shown = block.partition("\n")
    argv = command.removeprefix("$ python -m mlx_phase.report ").split()
    out = report(capsys, *argv)
    printed = "\n".join(line.rstrip() for line in out.splitlines())
    assert shown == printed.strip(), f"put the output of {command} into README.md"


def test_sections_can_be_chosen(capsys):
    argv = ("--model", "tiny", "--chip", "m1", "--markdown")
    out = report(capsys, *argv, "--section", "7", "--section", "4")
    heads = [line for line in out.splitlines() if line.startswith("## ")]
    assert [head[:5] for head in heads] == ["## 4.", "## 7."]


def test_every_listed_chip_can_be_asked_for(capsys):
    out = report(capsys, "--list-chips")
    keys = [line.split("│")[1].strip() for line in out.splitlines() if "│" in line]
    assert len(keys) > 38 and len({lookup(key) for key in keys}) == len(keys)


@pytest.mark.parametrize(
    "argv", [("--batch", "0"), ("--acceptance", "1.5"), ("--itl-ms", "x")]
)
def test_bad_options_are_refused(capsys, argv):
    with pytest.raises(SystemExit):
        main(("--model", "tiny", *argv))
    assert "must be a" in capsys.readouterr().err


def test_options_are_checked_without_the_command_line():
    with pytest.raises(ValueError, match="batch must be 1 or more, got 0"):
        analysis(batch=0)
    with pytest.raises(ValueError, match="4, 8 or 16 bits"):
        analysis(kv_bits=5)
