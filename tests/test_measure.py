"""The clock rules of the bench, on fake clocks (public reports B1 and B2)."""

import statistics

import pytest

from mlx_phase.bench import measure


class Clock:
    """Time that only moves when something is done."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


class Queue:
    """A lazy device: queueing is free, `evaluate` pays a floor plus n operations."""

    def __init__(self, clock, floor=0.25e-3, op=0.02e-3):
        self.clock, self.floor, self.op = clock, floor, op
        self.evaluated = []

    def chain(self, n):
        return n

    def evaluate(self, n):
        self.evaluated.append(n)
        self.clock.now += self.floor + n * self.op


def test_b1_fixed_cost_of_an_evaluation_is_not_in_the_time_of_an_op():
    clock = Clock()
    queue = Queue(clock)
    got = measure.per_op(queue.chain, (10, 60), evaluate=queue.evaluate, clock=clock)
    assert got == pytest.approx(0.02e-3)
    # One operation per evaluation would have said 0.27 ms.
    start = clock()
    queue.evaluate(1)
    assert clock() - start == pytest.approx(0.27e-3)


def test_a_disturbed_try_does_not_count():
    clock = Clock()
    queue = Queue(clock)
    tries = []

    def evaluate(n):
        tries.append(n)
        queue.evaluate(n)
        clock.now += 1.0 if len(tries) in (2, 4, 6) else 0.0

    got = measure.per_op(queue.chain, (10, 60), evaluate=evaluate, clock=clock)
    assert got == pytest.approx(0.02e-3)


def pair(a, b, repeats, **options):
    return measure.pair_of(measure.interleave({"A": a, "B": b}, repeats, **options))


def test_times_that_are_not_above_zero_are_noise():
    with pytest.raises(measure.NoiseError, match="too noisy"):
        pair(lambda: 1.0, lambda: -0.1, 3)


@pytest.mark.parametrize("lengths", [(0, 5), (5, 5), (7, 3)])
def test_per_op_refuses_lengths_that_do_not_grow(lengths):
    queue = Queue(Clock())
    with pytest.raises(ValueError, match="short < long"):
        measure.per_op(queue.chain, lengths, evaluate=queue.evaluate)


def test_b1_inputs_are_evaluated_before_the_clock_starts():
    clock, log = Clock(), []

    def evaluate(value):
        log.append((value, clock()))
        clock.now += 1.0 if value == "input" else 0.02

    got = measure.timed(
        lambda: "input", lambda value: "output", evaluate=evaluate, clock=clock
    )
    assert got == pytest.approx(0.02)
    assert [value for value, _ in log] == ["input", "output"]


def test_b1_warm_up_is_excluded():
    calls = {"a": 0, "b": 0}

    def trial(name, normal):
        def run():
            calls[name] += 1
            return 5.0 if calls[name] == 1 else normal  # the first one compiles

        return run

    found = pair(trial("a", 1.0), trial("b", 2.0), 4)
    assert (found.a.high, found.b.high) == (1.0, 2.0)
    assert found.ratio == pytest.approx(2.0)
    assert calls == {"a": 5, "b": 5}


def heating(growth=1.05):
    """A trial that takes 5 % longer than the one before, whatever it runs."""
    state = {"t": 1.0}

    def run():
        state["t"] *= growth
        return state["t"]

    return run


@pytest.mark.parametrize("repeats", [3, 4, 5, 6, 8, 9])
def test_b2_equal_sides_on_a_heating_chip_give_ratio_one(repeats):
    trial = heating()
    found = pair(trial, trial, repeats)
    assert found.ratio == pytest.approx(1.0, abs=0.03)


@pytest.mark.parametrize("repeats", [4, 6, 8])
def test_b2_interleaved_medians_agree(repeats):
    trial = heating()
    found = pair(trial, trial, repeats)
    assert found.b.median / found.a.median == pytest.approx(1.0, abs=0.03)


def test_b2_runs_one_after_the_other_would_not():
    trial = heating()
    first = statistics.median(trial() for _ in range(4))
    second = statistics.median(trial() for _ in range(4))
    assert second / first > 1.2


def test_b2_a_real_difference_survives_the_heat():
    trial = heating()
    found = pair(trial, lambda: 1.5 * trial(), 5)
    assert found.ratio == pytest.approx(1.5, rel=0.03)


def test_order_is_abba_and_rests_come_before_each_trial():
    log = []
    found = pair(
        lambda: log.append("A") or 1.0,
        lambda: log.append("B") or 1.0,
        4,
        warmup=0,
        delay=2.5,
        sleep=lambda s: log.append(s),
    )
    assert found.order == "ABBAABBA"
    assert log == [step for side in "ABBAABBA" for step in (2.5, side)]


def test_three_sides_are_compared_with_b_free_of_drift():
    trial = heating()
    trials = {"A": trial, "B": lambda: 2 * trial(), "C": lambda: 4 * trial()}
    samples = measure.interleave(trials, 6)
    assert measure.pair_of(samples).ratio == pytest.approx(2.0, rel=0.03)
    found = measure.pair_of(samples, "C")
    assert found.ratio == pytest.approx(0.5, rel=0.03)
    assert found.order == "ABCCBA" * 3
    alone = measure.pair_of({"A": [1.0, 2.0]})
    assert (alone.b, alone.ratio, alone.order) == (None, None, "AA")


def test_one_repeat_gives_its_plain_ratio():
    assert pair(lambda: 2.0, lambda: 3.0, 1).ratio == pytest.approx(1.5)
    with pytest.raises(ValueError, match="at least 1"):
        pair(lambda: 2.0, lambda: 3.0, 0)


@pytest.mark.parametrize("repeats, verdict", [(1, False), (2, False), (3, True)])
def test_b2_fewer_than_three_repeats_are_not_comparable(repeats, verdict):
    text = measure.verdict(repeats)
    assert (text == measure.COMPARABLE) is verdict
    if not verdict:
        assert text == f"not comparable: {repeats} repeats, 3 needed"


def test_a_failed_check_is_not_comparable_and_all_reasons_are_named():
    text = measure.verdict(2, ["wrong result"])
    assert text == "not comparable: 2 repeats, 3 needed; wrong result"
    assert measure.verdict(9, ["x"]).startswith("not comparable: x")


def test_stats_give_median_quartiles_and_range():
    s = measure.stats([5.0, 1.0, 2.0, 4.0, 3.0])
    assert (s.median, s.q1, s.q3, s.low, s.high, s.count) == (3, 2, 4, 1, 5, 5)
    assert s.spread == pytest.approx(2 / 3)
    assert s.scaled(10).q3 == 40
    with pytest.raises(ValueError, match="no samples"):
        measure.stats([])


def test_percentile_interpolates():
    assert measure.percentile([4, 1, 3, 2], 50) == 2.5
    assert measure.percentile([1, 2], 99) == pytest.approx(1.99)
    assert measure.percentile([7], 99) == 7
    with pytest.raises(ValueError, match="no samples"):
        measure.percentile([], 50)


@pytest.mark.parametrize("size", [1, 7, 60, 61, 119, 120, 121, 500])
def test_rotation_streams_more_than_twice_the_cache(size):
    count = measure.copies(size, cache_bytes=60)
    assert count >= 2
    assert count * size > 2 * 60
    # One buffer less would not do (beyond the two that a rotation needs).
    assert count == 2 or (count - 1) * size <= 2 * 60


def test_rotation_comes_back_to_a_buffer_only_after_all_others():
    order = measure.rotate("abc")
    assert [next(order) for _ in range(7)] == list("abcabca")
    with pytest.raises(ValueError, match="no buffers"):
        next(measure.rotate([]))
    with pytest.raises(ValueError, match="above 0"):
        measure.copies(0, 60)
