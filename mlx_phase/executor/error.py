"""The one error that executors raise for what is wrong with a kernel or a machine."""


class ExecutorError(RuntimeError):
    """A kernel cannot be built or run here; the text says why and what to do."""
