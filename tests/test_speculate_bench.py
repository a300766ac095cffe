"""The bench with drafts: tallies on fakes, and the real command on tiny models."""

from contextlib import contextmanager

import mlx.core as mx
import pytest
from bench_models import Tokenizer, config, run_of
from mlx_lm.models.cache import RotatingKVCache
from test_traced import model as tiny

from mlx_phase import ops, patched
from mlx_phase.bench import BenchError, record, speculate, speculate_show
from mlx_phase.bench import __main__ as cli
from mlx_phase.bench.compare_rows import why_not
from mlx_phase.bench.device import environment
from mlx_phase.bench.speculate_result import Candidate, Job, rows
from mlx_phase.models import Loaded
from mlx_phase.step import expected_tokens

PROMPT = [3, 17, 5, 9, 3, 17, 5, 11]


def job(**change) -> Job:
    values = {"name": "m", "prompt": PROMPT, "tokens": 9}
    values |= {"repeats": 3, "draft": "lookup", "draft_tokens": (1, 3)}
    return Job(**values | change)


@contextmanager
def patch(model):
    yield "report"


def measured(step=0.1, faster=2.0, other=None, clock=None, **change):
    """A job on a fake whose drafts are all accepted, ``faster`` times plain's speed."""
    log = []

    def fake(model, prompt, n, *, on_token, keep_logprobs=False, steps=None, kv=None):
        drafts, tokens = 0, list(range(n))
        arrivals = [0.4 + step * i for i in range(n)]
        if steps is not None:
            drafts, tally = steps.args[1:]
            arrivals = [0.4] * (drafts + 1)
            while len(arrivals) < n:
                after = arrivals[-1] + step * (drafts + 1) / faster
                arrivals += [after] * (drafts + 1)
            arrivals = arrivals[:n]
            tally += [(drafts, drafts)] * (n // (drafts + 1))
            tokens = other or tokens
        log.append(drafts)
        run = run_of(arrivals, tokens, len(prompt))
        run.logprobs = [-5.0 * mx.arange(8.0) for _ in tokens]
        return run

    ticks = iter(range(10**6))
    clock = clock or (lambda: 0.05 * next(ticks))
    result = speculate.measure(tiny(), job(**change), patch, generate=fake, clock=clock)
    return result, log


def test_every_round_turns_the_order():
    result, log = measured()
    assert log == [0, 1, 3] + [0, 1, 3] + [3, 1, 0] + [0, 1, 3]
    assert len(log) == result.job.runs and result.job.rows == (1, 2, 4)
    assert result.report == "report"
    assert result.comparable == "yes" and result.equal == {1: "yes", 3: "yes"}


def test_tokens_that_come_with_the_prompt_are_not_counted():
    result, _ = measured(tokens=12)
    for c in result.drafted:
        # The first verification's tokens all arrive at once, with the prompt.
        assert c.stats.median == pytest.approx(0.1 / 2)
        assert result.speed_up(c) == pytest.approx(2)
        assert (c.accepted, c.acceptance) == (c.drafts, 1)
    assert result.plain.stats.median == pytest.approx(0.1)
    idle = Candidate(2, steps=[(0, 0), (0, 0)])
    assert idle.acceptance is None and idle.accepted == 0


def test_other_tokens_are_a_failed_check():
    result, _ = measured(other=[0, 1, 2, 3, 7, 5, 6, 7, 8])
    assert "differ at token 5: plain 4, 1 drafts 7" in result.equal[1]
    assert result.comparable.startswith("not comparable: tokens differ at token 5")


def test_a_kernel_that_is_off_is_a_failed_check():
    ops.disable("qmv test", "wrong result")
    assert measured()[0].comparable == "not comparable: kernel qmv test: wrong result"


def test_rows_carry_speeds_costs_and_break_even():
    result, _ = measured(kv=None, tokens=12)
    found = rows(result, environment())
    assert [(r["phase"], r["M"]) for r in found] == [
        *(("verify", m) for m in (1, 2, 4)),
        *(("decode", m) for m in (2, 4)),
    ]
    last = found[-1]
    assert (last["draft"], last["draft_tokens"]) == ("lookup", 3)
    assert last["speed_up"] == pytest.approx(2) and last["accepted"] == 3
    assert last["plain_tok_s"] == pytest.approx(10)
    # Each step takes 50 ms of the fake clock, a plain token 100: any draft gains.
    assert found[2]["us"] == pytest.approx(5e4)
    assert found[2]["cost_ratio"] == pytest.approx(1)
    assert last["break_even"] == pytest.approx(0, abs=1e-6)
    assert why_not(last) == "with drafts (not plain decoding)"


def test_break_even_weighs_a_verification_against_a_plain_token():
    ticks = iter(x * 0.2 for x in range(10**6))
    result, _ = measured(clock=lambda: next(ticks), tokens=12)
    # 200 ms a step against 100 ms: a step has to give two tokens.
    assert result.break_even(1) is None
    assert expected_tokens(result.break_even(3), 3) == pytest.approx(2)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"faster": 2.0}, "Speculation pays here: 3 drafts by lookup: 2.00 times"),
        ({"faster": 1.0}, "Speculation makes no difference here"),
        ({"faster": 0.5}, "Speculation does not pay here: 3 drafts"),
        ({"repeats": 2}, "Too few repeats to say whether speculation pays: 3 needed"),
    ],
)
def test_the_conclusion_says_whether_it_pays(change, text):
    result, _ = measured(**{"tokens": 12, "draft_tokens": (3,)} | change)
    assert speculate_show.conclusion(result).startswith(text)


def test_the_conclusion_names_what_is_missing():
    result, _ = measured(faster=0.5, tokens=12, draft_tokens=(3,))
    assert "it does from 0%" in speculate_show.conclusion(result)
    result.drafted[0].steps = [(0, 0)] * 9
    assert "no n-gram of the text came twice" in speculate_show.conclusion(result)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"draft_tokens": (1, 16)}, "numbers of 1 to 15"),
        ({"draft_tokens": (0,)}, "rows are exact up to 16"),
        ({"tokens": 4}, "--tokens 4: one verification of 3 drafts"),
    ],
)
def test_what_cannot_be_measured_is_refused(change, text):
    with pytest.raises(BenchError, match=text):
        measured(**change)


@pytest.mark.parametrize("whose", ["model", "draft model"])
def test_a_cache_that_cannot_roll_back_is_refused(whose):
    target, draft = tiny(), tiny()
    bad = target if whose == "model" else draft
    bad.make_cache = lambda: [RotatingKVCache(16) for _ in bad.layers]
    with pytest.raises(BenchError, match=f"of the {whose}, and its RotatingKVCache"):
        speculate.measure(target, job(), patch, draft=draft)


# --- on real models ---


def load(seed_model=None, tokenizer=None, vocab=96, name="tiny-test") -> Loaded:
    m = seed_model or tiny("llama", mx.bfloat16)
    return Loaded(m, tokenizer, name, config(vocab_size=vocab), "made by the test")


def test_tallies_of_mlx_lm_are_those_of_its_flags():
    m, draft = tiny("llama", mx.bfloat16), tiny("llama", mx.bfloat16)
    asked = job(draft="same", draft_tokens=(4,), tokens=9, repeats=1)
    result = speculate.measure(m, asked, patched, draft=draft)
    (c,) = result.drafted
    assert result.equal == {4: "yes"}
    # The same weights: all drafts are right. 5 + 4 tokens, the last 4 all drafted.
    assert c.steps == [(4, 4), (4, 4)]
    assert result.draft_cost > 0 and result.served.kernels


@pytest.mark.parametrize("kv", [[], ["--kv-bits", "8"]])
def test_the_command_gives_equal_tokens_and_appends_rows(
    capsys, tmp_path, monkeypatch, kv
):
    monkeypatch.setenv("COLUMNS", "120")
    found = load()
    monkeypatch.setattr(cli, "load", lambda spec: found)
    path = tmp_path / "rows.jsonl"
    options = "--draft lookup --draft-tokens 1,4 --tokens 16 --prompt-tokens 12"
    assert cli.main([*options.split(), *kv, "--json", str(path)]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "drafts by lookup: prompt 12 tokens, 16 generated" in out
    assert "Speculation" in out or "Nothing was drafted" in out
    written = record.read(path)
    assert [r["tokens_equal"] for r in written] == [None] * 3 + ["yes"] * 2
    assert all(r["comparable"] == "yes" for r in written)
    assert {r["kv_bits"] for r in written} == {int(kv[1]) if kv else None}
    if environment().executor == "cpu":
        assert "times of an emulation" in out
        assert written[0]["note"].startswith("emulation")


def test_a_draft_of_another_family_is_refused(capsys, monkeypatch):
    class Other(Tokenizer):
        def encode(self, text):
            return super().encode(text)[::-1]

    models = {"a": load(tokenizer=Tokenizer(), name="a")}
    models["b"] = load(tokenizer=Other(), name="b")
    models["c"] = load(vocab=97, name="c")
    monkeypatch.setattr(cli, "load", models.get)
    for draft, text in (("b", "it has other tokens than a"), ("c", "its 97 tokens")):
        assert cli.main(["--model", "a", "--draft", draft]) == 2
        assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ("--draft-tokens 2", "--draft-tokens needs --draft"),
        ("--draft lookup --no-stock", "leave --no-stock out"),
        ("--draft lookup --draft-tokens 0", "at least 1"),
    ],
)
def test_options_that_do_not_belong_together(capsys, options, text):
    try:
        assert cli.main(options.split()) == 2
    except SystemExit as end:
        assert end.code == 2
    assert text in capsys.readouterr().err
