"""Races: who wins, what noise and drift do, one split per shape, budget, resuming."""

import pytest
from tune_world import EFFORT, KEY, World, at, plans

from mlx_phase import tune_race
from mlx_phase.bench import kernel_data
from mlx_phase.launch.matmul import device_chip
from mlx_phase.plan import Plan, plan
from mlx_phase.problem import Matmul
from mlx_phase.tune_course import Course
from mlx_phase.tune_plans import MAX_ACCUMULATORS, illegal
from mlx_phase.tune_probe import Probe, VoidError
from mlx_phase.tune_race import (
    MIN_NOISE,
    Referee,
    Track,
    built_in,
    kernel_op,
    splits_of,
    stock_op,
    tiles_of,
)

ONE = (Matmul(1, 128, 256, "float32"),)
PAIR = (Matmul(1, 64, 256, "float32"), Matmul(1, 32, 256, "float32"))


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
    assert "chains" in entry.source and len(world.ran) > 4


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


def test_the_tile_of_the_table_stays_where_the_difference_may_be_noise():
    def cost(problems, p):
        return 30 if p is None else 20 if p == built_in(problems) else 19.95

    entry, _ = race(cost)
    assert entry.rows == built_in(ONE).rows and entry.us == pytest.approx(20)


def test_a_kernel_is_raced_through_a_trace_as_layers_run_it(monkeypatch):
    """On a GPU; here stock is what is traced."""
    traces = []

    def prepare(problem, p):
        def call(x, *weights):
            traces.append(p)
            return kernel_data.stock(problem)(x, *weights)

        return call

    def prepare_shared(problems, p):
        def call(x, *weights):
            traces.append(p)
            return stock_op(problems)(x, *weights)

        return call

    monkeypatch.setattr(tune_race, "executor_name", lambda: "apple")
    monkeypatch.setattr(tune_race, "prepare", prepare)
    monkeypatch.setattr(tune_race, "prepare_shared", prepare_shared)
    for problems in (ONE, PAIR):
        traces.clear()
        op, track = kernel_op(problems, built_in(problems)), Track(problems, 0)
        for _ in range(3):
            ys = op(track.x, *next(track.next))
            assert [y.shape for y in ys] == [(1, p.N) for p in problems]
        assert len(traces) == 1 and track.error(op) < 1e-3


def test_every_tile_of_the_real_kernel_passes_its_checks_and_races():
    class Real(World):
        def right(self, problems, plan):
            return stock_op(problems) if plan is None else kernel_op(problems, plan)

    world = Real(lambda problems, p: 2 + p.rows if p else 9)
    referee = Referee(EFFORT, world.clock, world.kernel, world.stock, probe=lambda: 1.0)
    entry = referee.case(Track(PAIR, 0), PAIR, (1, 1))
    assert (entry.winner, entry.rows) == ("kernel", 2)
    assert {p.rows for p in world.ran} == {2, 4, 8}


def test_the_probe_takes_a_size_that_is_long_enough_and_settles():
    times = iter([1e-6, 3e-4] + [5e-4, 4e-4, 3.01e-4, 3.0e-4])
    probe = Fixed(times)
    assert probe() == pytest.approx(3.0e-4) and probe.size == 2048
    wild = Fixed(iter([3e-4] + [1e-4, 2e-4] * 9))
    with pytest.raises(VoidError, match="never took the same time"):
        wild()


class Fixed(Probe):
    """A probe whose products take given times."""

    def __init__(self, times):
        self.steps, self.queued, self.now, self.lengths = times, 0, 0.0, []
        super().__init__(clock=lambda: self.now, evaluate=self.spend)

    def _grow(self, size):
        self.size, self.arrays = size, [1]
        return self._once()

    def _once(self):
        self.each = next(self.steps)
        return super()._once()

    def _chain(self, length):
        self.queued = length
        return None

    def spend(self, _):
        self.now += self.each * self.queued


@pytest.mark.parametrize("problems", [ONE, PAIR, (Matmul(1, 8, 8192, "float16"),)])
def test_candidates_may_run_and_start_with_the_table(problems):
    for m in (1, 3, 8, 16):
        here = at(problems, m)
        base = built_in(here)
        found = splits_of(here) + tiles_of(here, (2, 1))
        assert found[0] == base and len(set(found)) > 2
        assert all(p.simdgroups % p.k_simdgroups == 0 for p in found)
        assert all(p.rows * m <= MAX_ACCUMULATORS for p in found)
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


def test_a_plan_that_is_not_of_the_table_keeps_the_rest_of_it():
    base = plan(ONE[0], device_chip())
    run, _ = course(lambda problems, p: 1 if p else 2)
    run.run([ONE], (1,))
    p = run.plans.decide(ONE, exact=True)
    assert (p.kernel, p.exact) == (base.kernel, base.exact)
    assert "tuned at M = 1" in p.reason and run.plans.key == KEY
