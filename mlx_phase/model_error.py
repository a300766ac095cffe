"""The one error that loading a model raises."""


class ModelError(ValueError):
    """A model cannot be loaded; the message says why and what to do."""
