"""The likeliest token of each row of logits.

Legend: S rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ryzanstein.worker.model.kernels.native import NativeKernels

Likeliest = Callable[[Tensor], tuple[Tensor, Tensor]]


def new_likeliest(kernels: NativeKernels | None) -> Likeliest:
    """A function of logits [S, V]: the greatest logit of each row and the lowest token that has it, NaN where the row has one.

    Of our own where there are kernels: torch's takes 0.5 ms for a row of 131,072."""
    return _likeliest if kernels is None else kernels.greatest


def _likeliest(logits_SV: Tensor) -> tuple[Tensor, Tensor]:
    best_S, token_S = logits_SV.max(dim=1)
    return best_S, token_S
