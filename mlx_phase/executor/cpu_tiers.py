"""Which build of a kernel a launch gets: one that is soon made, or one that is fast.

Most kernels of a test or of a first look run for milliseconds and compile for longer,
so they begin unoptimised. Both builds round every operation and give the same bits.
"""

from __future__ import annotations

import time

from mlx_phase.executor.cpu_launch import Call, is_built, launch, load
from mlx_phase.executor.signature import MetalSource

#: Bytes of a launch's arrays from which it gets the fast build at once.
FAST_BYTES = 64 << 10
#: Processor seconds of launches after which the next gets the fast build: about the
#: time that this one takes to compile.
FAST_SECONDS = 0.3


class Tiers:
    """The builds of one specialised kernel."""

    def __init__(self, name: str, metal: MetalSource, nbytes: int) -> None:
        """Build or load for a first launch on ``nbytes`` bytes of arrays.

        Raises ExecutorError with the compiler's words if it does not compile.
        """
        self._name, self._metal, self._spent = name, metal, 0.0
        # A fast build that an earlier process has made costs nothing.
        self.is_fast = nbytes >= FAST_BYTES or is_built(metal)
        self.library = load(name, metal, self.is_fast)

    @property
    def arena_bytes(self) -> int:
        """Threadgroup memory in bytes."""
        return self.library.arena_bytes

    def launch(self, call: Call) -> None:
        """Run ``call`` as `cpu_launch.launch` does."""
        if not self.is_fast and (
            self._spent > FAST_SECONDS or call.nbytes >= FAST_BYTES
        ):
            self.library, self.is_fast = load(self._name, self._metal, True), True
        start = time.process_time()
        launch(call, self.library)
        self._spent += time.process_time() - start
