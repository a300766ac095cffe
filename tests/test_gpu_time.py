"""GPU times from profiler records, on fake records."""

import importlib.util

import pytest

from mlx_phase.bench import gpu_time
from mlx_phase.bench.gpu_time import Event, ProfileError


def test_records_must_be_the_program_that_was_launched():
    kernels = {"A": ["k", "r"], "B": ["s"]}
    events = [Event(n, i, us) for i, (n, us) in enumerate(
        [("k", 3), ("r", 1), ("s", 7), ("s", 8), ("k", 5), ("r", 2)]
    )]  # fmt: skip
    got = gpu_time.split(events, "ABBA", kernels)
    assert got == {"A": [4, 7], "B": [7, 8]}
    with pytest.raises(ProfileError, match="recorded 5 kernels where 6"):
        gpu_time.split(events[:-1], "ABBA", kernels)
    with pytest.raises(ProfileError, match="another order"):
        gpu_time.split(events[::-1], "ABBA", kernels)


def test_kernels_of_one_launch_are_learned():
    def events(fn):
        return [Event(n, 0, 1) for n in ["k", "r"] * 3]

    assert gpu_time.learn(lambda: None, 3, events) == ["k", "r"]
    with pytest.raises(ProfileError, match="do not repeat"):
        gpu_time.learn(lambda: None, 4, events)


def test_kernel_times_group_by_name():
    events = [Event("a", 0, 1.0), Event("b", 1, 2.0), Event("a", 2, 3.0)]
    got = gpu_time.kernel_times(lambda: None, lambda fn: events)
    assert got == {"a": [1.0, 3.0], "b": [2.0]}


def test_a_missing_profiler_is_named():
    if importlib.util.find_spec("torch"):
        pytest.skip("torch is installed")
    with pytest.raises(ProfileError, match="pip install torch"):
        gpu_time.kernel_times(lambda: None)
