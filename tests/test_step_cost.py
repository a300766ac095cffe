"""What a decode step asks of the GPU, as the bench counts it."""

from functools import partial

import pytest
from bench_models import tiny

import mlx_phase
from mlx_phase.bench import endtoend
from mlx_phase.bench.gpu_time import Event, ProfileError
from mlx_phase.bench.step_cost import STEPS, Decoding, graph_launches, step_cost

PROMPT = [1, 2, 3]


def test_nodes_of_a_graph_are_counted_without_views():
    found = graph_launches(Decoding(tiny(), PROMPT, None))
    # Seven matrices a layer, their norms, rotations, cache writes and attention.
    assert found > 20
    assert graph_launches(Decoding(tiny(), PROMPT, None)) == found


def profiler(kernels: int, us: float):
    def events(fn):
        fn()
        return [Event(f"k{i}", 0.0, us) for i in range(kernels)]

    return events


def test_a_profiler_counts_kernels_and_their_time():
    cost = step_cost(tiny(), PROMPT, None, profiler(10 * STEPS, 3.0))
    assert cost == (10, pytest.approx(30.0))


@pytest.mark.parametrize("missing", [False, True])
def test_where_it_fails_the_graph_is_counted(missing):
    def events(fn):
        if missing:
            raise ProfileError("no torch")
        fn()
        return [Event("k", 0.0, 1.0)] * (STEPS + 1)

    launches, us = step_cost(tiny(), PROMPT, None, events)
    assert us is None and launches == step_cost(tiny(), PROMPT, None, None)[0]


def test_rows_hold_both_sides():
    job = endtoend.Job("m", {}, PROMPT, 3, 1, host_steps=1)
    events = profiler(8 * STEPS, 5.0)
    patch = partial(mlx_phase.patched, check=False)
    result = endtoend.measure(tiny(), job, patch, events=events)
    assert result.patched.launches == result.stock.launches == 8
    assert result.patched.gpu_us == result.stock.gpu_us == 40.0
