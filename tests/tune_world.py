"""A machine for races: right results, a clock that moves by what a launch costs."""

from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn

from mlx_phase import tune_store
from mlx_phase.bench.kernel_timer import Effort
from mlx_phase.tune_plans import Entry, Key, StoredPlans
from mlx_phase.tune_race import Referee, stock_op

EFFORT = Effort(repeats=4, launches=2, chain=(1, 3))
KEY = Key("sm_90", 132, "Linux 1", "0.32.4", "cafe")


class World:
    """`cost(problems, plan)` gives microseconds of a launch; plan None is stock."""

    def __init__(self, cost):
        self.cost, self.now, self.ran = cost, 0.0, []

    def clock(self):
        return self.now

    def right(self, problems, plan):
        """What computes the products."""
        return stock_op(problems)

    def _op(self, problems, plan):
        real = self.right(problems, plan)

        def run(x, *weights):
            self.now += 1e-6 * self.cost(problems, plan)
            return real(x, *weights)

        return run

    def kernel(self, problems, plan):
        if plan not in self.ran:
            self.ran.append(plan)
        return self._op(problems, plan)

    def stock(self, problems):
        return self._op(problems, None)

    def referee(self, **options):
        options = {
            "clock": self.clock,
            "kernel": self.kernel,
            "stock": self.stock,
            "passes": lambda problems, plan: None,
            "probe": lambda: 1.0,
        } | options
        return Referee(EFFORT, **options)


def entry(problems, rows=2, simdgroups=2, split=(1, 1), winner="kernel", **values):
    """A race's result, 10 us against stock's 20 unless told otherwise."""
    ratio = 2.0 if winner == "kernel" else 0.5
    values = {"us": 20 / ratio, "stock_us": 20.0, "ratio": ratio} | values
    values = {"noise": 0.01, "source": "wall"} | values
    return Entry(tuple(problems), rows, simdgroups, *split, winner, **values)


def plans(*entries, key=KEY):
    """Stored plans of some results."""
    return StoredPlans(key, entries)


def at(problems, m):
    """The same problems with M = m."""
    return tuple(replace(p, M=m) for p in problems)


def store(path, *entries, **key):
    """Write a plan of this device, but for the given parts of its key."""
    here = replace(tune_store.device_key(), **key)
    tune_store.save(plans(*entries, key=here), path)


def quantized(n=96, k=128, bits=4, dtype=mx.float32):
    """A quantised layer [n, k] with the same weights every time."""
    mx.random.seed(n + k)
    layer = nn.Linear(k, n, bias=False)
    layer.set_dtype(dtype)
    return nn.QuantizedLinear.from_linear(layer, group_size=64, bits=bits)
