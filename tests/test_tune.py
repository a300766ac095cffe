"""Races: who wins, what noise and drift do, one split per shape, budget, resuming."""

from dataclasses import replace

import pytest
from tune_world import KEY, World, plans

from mlx_phase import tune
from mlx_phase.bench import BenchError, gpu_time
from mlx_phase.launch.matmul import device_chip
from mlx_phase.plan import Plan, plan
from mlx_phase.problem import Matmul
from mlx_phase.tune_course import Course
from mlx_phase.tune_plans import illegal
from mlx_phase.tune_race import (
    MIN_NOISE,
    Track,
    VoidError,
    built_in,
    splits_of,
    tiles_of,
)

ONE = (Matmul(1, 128, 256, "float32"),)
PAIR = (Matmul(1, 64, 256, "float32"), Matmul(1, 32, 256, "float32"))


def at(problems, m):
    return tuple(replace(p, M=m) for p in problems)


def race(cost, problems=ONE, split=None, **options):
    world = World(cost)
    return world.referee(**options).case(Track(problems, 0), problems, split), world


def test_the_fastest_candidate_wins_and_is_stored_with_its_times():
    def cost(problems, p):
        return 30 if p is None else 10 if (p.rows, p.simdgroups) == (2, 2) else 20

    entry, world = race(cost)
    assert (entry.winner, entry.rows, entry.simdgroups) == ("kernel", 2, 2)
    assert (entry.us, entry.stock_us) == pytest.approx((10, 30))
    assert entry.ratio == pytest.approx(3) and entry.noise == MIN_NOISE
    assert entry.source == "wall" and len(world.ran) > 4


@pytest.mark.parametrize("us", [20, 25, 19.9])
def test_stock_keeps_what_the_kernel_does_not_win(us):
    entry, _ = race(lambda problems, p: us if p else 20)
    assert entry.winner == "stock"


def test_a_win_counts_only_above_twice_the_noise():
    def machine(noise):
        ticks = iter(range(10**6))
        # Whole trials are slow, so the fastest of a few tries is as well.
        return lambda problems, p: (
            18 if p else 20 * (1 + noise * (next(ticks) // 12 % 2))
        )

    calm, _ = race(machine(0.0))
    wild, _ = race(machine(0.3))
    assert calm.winner == "kernel" and calm.noise == MIN_NOISE
    assert wild.winner == "stock" and wild.noise > 0.05


def test_a_candidate_with_wrong_results_does_not_race():
    def passes(problems, p):
        return "wrong" if p.rows == 4 else None

    entry, world = race(lambda problems, p: 5 if p else 50, passes=passes)
    assert entry.winner == "kernel" and entry.rows != 4
    assert {p.rows for p in world.ran} == {2, 8}


def test_wrong_products_of_the_full_size_are_found_and_stock_is_named():
    world = World(lambda problems, p: 5 if p else 50)
    honest = world.kernel

    def bad(problems, p):
        op = honest(problems, p)
        return lambda x, *w: [y * 1.1 for y in op(x, *w)]

    referee = world.referee(kernel=bad)
    entry = referee.case(Track(ONE, 0), ONE, None)
    assert entry.winner == "stock" and "no candidate runs" in entry.note
    assert "wrong result" in entry.note and illegal(entry) is None


def test_a_machine_that_changes_voids_the_case():
    probes = iter([1.0, 1.06])
    with pytest.raises(VoidError, match="6%"):
        race(lambda problems, p: 1, probe=lambda: next(probes))
    probes = iter([1.0, 1.04])
    race(lambda problems, p: 1, probe=lambda: next(probes))


def test_a_clock_that_stands_still_voids_the_case():
    with pytest.raises(VoidError, match="noisy"):
        race(lambda problems, p: 0)


def test_without_a_profiler_the_case_starts_over_with_wall_times():
    def missing(fn):
        raise gpu_time.ProfileError("no torch")

    world = World(lambda problems, p: 1 if p else 2)
    referee = world.referee(events=missing)
    entry = referee.case(Track(ONE, 0), ONE, None)
    assert entry.source == "wall" and referee.why_wall == "no torch"


@pytest.mark.parametrize("problems", [ONE, PAIR, (Matmul(1, 8, 8192, "float16"),)])
def test_candidates_may_run_and_start_with_the_table(problems):
    for m in (1, 3, 8, 16):
        here = at(problems, m)
        base = built_in(here)
        found = splits_of(here) + tiles_of(here, (2, 1))
        assert found[0] == base and len(set(found)) > 2
        assert all(p.simdgroups % p.k_simdgroups == 0 for p in found)
        assert all(p.rows * m <= 24 for p in found)
        assert {(p.k_simdgroups, p.splits) for p in tiles_of(here, (2, 1))} == {(2, 1)}


def course(cost, stored=None, **options):
    world, saves = World(cost), []
    found = Course(
        stored or plans(),
        world.referee(),
        save=lambda: saves.append(1),
        clock=world.clock,
        **options,
    )
    return found, saves


def test_all_m_of_a_shape_split_k_alike():
    def cost(problems, p):
        if p is None:
            return 50
        # One split is best for M = 1 and another for all others.
        return 10 if p.k_simdgroups == (2 if problems[0].M == 1 else 1) else 20

    run, saves = course(cost)
    run.run([ONE, PAIR], (1, 2, 16))
    assert len(run.raced) == len(saves) == 6
    assert {e.split for e in run.plans} == {(2, 1)}
    assert {p.k_simdgroups for e in run.plans for p in [chosen(run, e)]} == {2}


def chosen(run, e) -> Plan:
    return run.plans.decide(e.problems, exact=True)


def test_a_shared_launch_that_loses_has_its_members_raced():
    def cost(problems, p):
        if p is None:
            return 10 * len(problems)
        return 100 if len(problems) > 1 else 5

    run, _ = course(cost)
    run.run([PAIR, ONE], (1, 2))
    assert [len(e.problems) for e in run.raced] == [2, 2, 1, 1, 1, 1, 1, 1]
    assert "separate" in run.plans.decide(PAIR, exact=True)
    assert isinstance(run.plans.decide(PAIR[:1], exact=True), Plan)


def test_void_cases_are_tried_twice_and_named():
    world = World(lambda problems, p: 1 if p else 2)
    ticks = iter(range(100))
    referee = world.referee(probe=lambda: 1.0 + 0.5 * (next(ticks) % 2))
    saves = []
    run = Course(plans(), referee, save=lambda: saves.append(1))
    run.run([ONE], (1,))
    assert not run.raced and not saves and next(ticks) == 4
    assert "256x128" in run.void[0] and "M = 1" in run.void[0]


def test_the_budget_ends_and_resume_goes_on_with_the_same_split():
    def cost(problems, p):
        return 20 if p is None else 10 if p.k_simdgroups == 2 else 15

    first, _ = course(cost, budget=1e-9)
    first.run([ONE], (1, 2, 4))
    assert (len(first.raced), first.left) == (1, 2)
    # By now another split would be best.
    second, _ = course(
        lambda problems, p: 20 if p is None else 5 * p.k_simdgroups,
        stored=first.plans,
        resume=True,
    )
    second.run([ONE], (1, 2, 4))
    assert second.skipped == 1 and [e.M for e in second.raced] == [2, 4]
    assert {e.split for e in second.plans} == {(2, 1)}
    # Without resume everything is raced anew, and another split drops the old races.
    third, _ = course(
        lambda problems, p: 20 if p is None else 5 * p.k_simdgroups,
        stored=second.plans,
    )
    third.run([ONE], (1,))
    assert [(e.M, e.split) for e in third.plans] == [(1, (1, 1))]


def test_progress_counts_every_case():
    total, done = [2 * 2], []

    def advance(more):
        total[0] += more
        done.append(1)

    run, _ = course(lambda problems, p: 100 if p else 1, advance=advance)
    run.run([PAIR, ONE], (1, 2))
    assert len(done) == total[0] == 8


@pytest.mark.parametrize(
    "text, rows", [("1", (1,)), ("16, 2,1", (1, 2, 16)), ("3,7", (3, 7))]
)
def test_rows(text, rows):
    assert tune.numbers(text) == rows


@pytest.mark.parametrize("text", ["", "0", "17", "1,,2", "a", "-1", "1.5"])
def test_rows_are_refused_with_a_reason(text):
    with pytest.raises(BenchError, match="1 to 16"):
        tune.numbers(text)


def test_on_the_cpu_nothing_is_raced_or_stored(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MLX_PHASE_PLANS", str(tmp_path / "plans"))
    monkeypatch.setattr(tune, "Referee", None)
    assert tune.main(["--model", "tiny", "--rows", "1,4"]) == 0
    text = capsys.readouterr().out
    assert "dry run" in text and "qmv_pair" in text and "nothing is stored" in text
    assert not (tmp_path / "plans").exists()


@pytest.mark.parametrize(
    "options, words",
    [
        ("--rows 99", "1 to 16"),
        ("--repeats 2", "3 or more"),
        ("--budget 0", "above 0"),
        ("--model tiny:bits=32", "nothing to tune"),
        ("--model nonsense", "unknown model"),
        ("--export /nowhere/x.json", "nothing to export"),
        ("--import /nowhere/x.json", "No such file"),
    ],
)
def test_bad_input_is_one_line(options, words, capsys):
    assert tune.main(options.split()) == 2
    err = capsys.readouterr().err
    assert words in err and err.count("\n") == 1


def test_launches_of_a_model_are_those_that_patch_makes():
    name, found = tune.launches("tiny")
    shapes = [tuple((p.K, p.N) for p in problems) for problems in found]
    assert name == "tiny" and len(set(shapes)) == len(shapes)
    assert ((256, 768), (256, 768)) in shapes and ((768, 256),) in shapes
    assert ((256, 256), (256, 128), (256, 128)) in shapes
    assert all(p.M == 1 for problems in found for p in problems)


def test_a_plan_that_is_not_of_the_table_keeps_the_rest_of_it():
    base = plan(ONE[0], device_chip())
    run, _ = course(lambda problems, p: 1 if p else 2)
    run.run([ONE], (1,))
    p = run.plans.decide(ONE, exact=True)
    assert (p.kernel, p.exact) == (base.kernel, base.exact)
    assert "tuned at M = 1" in p.reason and run.plans.key == KEY
