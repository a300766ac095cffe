"""GPU time of kernels on CUDA, from the profiler's activity records.

CUPTI stamps the start and end of every kernel of the process, also of kernels that
MLX launches inside CUDA graphs. torch is only a convenient door to it: it is imported
here, on demand, and computes nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass


class ProfileError(RuntimeError):
    """No GPU times: says what is missing or what did not add up."""


@dataclass(frozen=True)
class Event:
    """One kernel on the GPU: name, start and duration in microseconds."""

    name: str
    start: float
    us: float


# MLX launches through CUDA graphs; some CUPTI versions lose kernels in them.
GRAPHS = "if it persists, try MLX_USE_CUDA_GRAPHS=0"

Recorder = Callable[[Callable[[], object]], list[Event]]


def cuda_events(fn: Callable[[], object]) -> list[Event]:
    """Run ``fn`` (which must synchronise) and return its kernels in order of start.

    ProfileError where torch, its CUDA build or the activity interface is missing.
    """
    # Reattaching after a teardown loses graph kernels in some CUPTI versions.
    os.environ.setdefault("TEARDOWN_CUPTI", "0")
    try:
        import torch
        from torch.autograd import DeviceType
        from torch.profiler import ProfilerActivity, profile
    except ImportError as error:
        raise ProfileError(
            "GPU times of kernels on CUDA need torch (its profiler reads CUPTI): "
            f"pip install torch ({error})"
        ) from error
    if not torch.cuda.is_available():
        raise ProfileError("torch sees no CUDA device: install a CUDA build of torch")
    torch.cuda.init()
    with profile(activities=[ProfilerActivity.CUDA]) as session:
        fn()
        torch.cuda.synchronize()
    events = [
        Event(e.name, e.time_range.start, e.time_range.elapsed_us())
        for e in session.events()
        if e.device_type == DeviceType.CUDA and not e.name.startswith("Mem")
    ]
    if not events:
        raise ProfileError(
            "the profiler returned no kernel: CUPTI may be locked by another profiler "
            f"or not permitted on this machine; {GRAPHS}"
        )
    return sorted(events, key=lambda event: event.start)


def kernel_times(
    fn: Callable[[], object],
    events: Recorder = cuda_events,
) -> dict[str, list[float]]:
    """GPU microseconds of every kernel that ``fn`` launched, by kernel name."""
    times: dict[str, list[float]] = {}
    for event in events(fn):
        times.setdefault(event.name, []).append(event.us)
    return times


def learn(
    run: Callable[[], object],
    launches: int,
    events: Recorder = cuda_events,
) -> list[str]:
    """Kernel names of one launch, in order. ``run`` makes ``launches`` equal ones."""
    names = [event.name for event in events(run)]
    per, rest = divmod(len(names), launches)
    one = names[:per]
    if rest or names != one * launches:
        raise ProfileError(
            f"{launches} equal launches gave {len(names)} kernels that do not repeat: "
            f"{sorted(set(names))}"
        )
    return one


def split(
    events: Sequence[Event], program: Sequence[str], kernels: Mapping[str, list[str]]
) -> dict[str, list[float]]:
    """GPU microseconds of each launch by side.

    ``program`` is the order of launches (letters of sides), ``kernels`` what one
    launch of a side consists of (`learn`); a launch's time is the sum of its kernels.
    ProfileError when the records are not exactly that program.
    """
    expected = [name for side in program for name in kernels[side]]
    got = [event.name for event in events]
    if got != expected:
        raise ProfileError(
            f"the profiler recorded {len(got)} kernels where {len(expected)} were "
            f"launched, or in another order; {GRAPHS}"
        )
    times: dict[str, list[float]] = {side: [] for side in kernels}
    at = 0
    for side in program:
        count = len(kernels[side])
        times[side].append(sum(event.us for event in events[at : at + count]))
        at += count
    return times
