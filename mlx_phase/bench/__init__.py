"""Measuring: end to end on a model, and the parts the kernel sweeps share."""


class BenchError(ValueError):
    """Input that can't be measured; the message says what to do."""
