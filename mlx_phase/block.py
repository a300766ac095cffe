"""Decoder blocks in few launches, on caches as they are or inside a traced step.

A block is matched by its structure (`block_match.py`) and then compared with its own
stock code on this machine (`step_patch.py`).
"""

from __future__ import annotations

import mlx.nn as nn

from .block_launch import Memo
from .block_match import Fused, match
from .block_step import Step
from .class_swap import copied, mixed, swap_back
from .joint_kinds import KINDS
from .plan import MAX_M
from .step_cache import StepCache


class _Block:
    """Mixed into a block's class by :func:`adopt_block`."""

    _fused: Fused
    _unfused: type
    _memo: Memo
    _train: bool = False

    @property
    def one_write(self) -> bool:
        """Whether its launches give new keys and values in one array."""
        return self._fused.rotary is not None

    def _set_training_mode(self, mode: bool) -> None:
        super()._set_training_mode(mode)
        object.__setattr__(self, "_train", bool(mode))

    def __call__(self, x, mask=None, cache=None, *args, **options):
        fits = isinstance(cache, StepCache) or type(cache) in KINDS
        if fits and not args and not options and x.size <= MAX_M * x.shape[-1]:
            # Layers may have been exchanged since, for example by adapters.
            if not self._train and match(self) == self._fused.parts:
                return Step(self, self._fused, self._memo)(x, mask, cache)
        return self._unfused.__call__(self, x, mask, cache, *args, **options)

    def __reduce_ex__(self, protocol):
        return copied(self, self._unfused, _OWN)


# What `adopt_block` keeps beside the parameters.
_OWN = ("_fused", "_unfused", "_memo", "_train")


def fused(block: nn.Module) -> bool:
    """Whether steps of a block run fused."""
    return isinstance(block, _Block)


def adopt_block(block: nn.Module, found: Fused) -> None:
    """Run ``block`` fused in steps of few rows."""
    stock = type(block)
    for name, value in (("_unfused", stock), ("_fused", found), ("_memo", Memo())):
        object.__setattr__(block, name, value)
    block.__class__ = mixed(_Block, stock)


def release_block(block: nn.Module) -> None:
    """Give a block its own class back."""
    swap_back(block, block._unfused, _OWN)
