"""``python -m mlx_phase.report``: phases, bounds, kernels and what would flip."""

from .analysis import Analysis, Options, analyse

__all__ = ["Analysis", "Options", "analyse"]
