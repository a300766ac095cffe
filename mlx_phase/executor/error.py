"""The errors that executors raise for what is wrong with a kernel or a machine."""

from __future__ import annotations


class ExecutorError(RuntimeError):
    """A kernel cannot be built or run here; the text says why and what to do."""


class SanitizerError(ExecutorError):
    """The sanitizer found a bug in a kernel; the text is for people.

    ``check``: mem, race, init or sync. ``kernel``: its name. ``place``: "source line 3"
    of the access, "" where unknown. ``thread``: index in its threadgroup, and
    ``threadgroup``: position in the grid, or None. ``buffer``: name of the array, and
    ``index`` of the element (flat), or None.
    """

    def __init__(
        self,
        text: str,
        check: str,
        kernel: str,
        place: str = "",
        thread: int | None = None,
        threadgroup: tuple[int, int, int] | None = None,
        buffer: str | None = None,
        index: int | None = None,
    ) -> None:
        super().__init__(f"kernel {kernel!r}: {check}: {text}")
        self.check, self.kernel, self.place = check, kernel, place
        self.thread, self.threadgroup = thread, threadgroup
        self.buffer, self.index = buffer, index
