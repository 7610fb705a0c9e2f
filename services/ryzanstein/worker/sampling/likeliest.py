"""The likeliest token of each row of logits.

Legend: S rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ryzanstein.worker.kernels.native import NativeKernels

Likeliest = Callable[[Tensor], tuple[Tensor, Tensor]]


def new_likeliest(kernels: NativeKernels | None) -> Likeliest:
    """Returns a function that finds the greatest logit of each row of logits [S, V].

    It also returns the lowest token that has it. The greatest logit is NaN if the row contains one.
    Our own kernel is used if there is one: torch takes 0.5 ms for a row of 131,072.
    """
    return _likeliest if kernels is None else kernels.sampling.greatest


def _likeliest(logits_SV: Tensor) -> tuple[Tensor, Tensor]:
    best_S, token_S = logits_SV.max(dim=1)
    return best_S, token_S
