"""What is computed of logits: the greatest one, those that are allowed, draws.

Legend: S rows of logits, V vocabulary, W words of 32 of its tokens' bits, R draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import CDLL, POINTER, Structure, c_double, c_int, c_int64, c_void_p
from dataclasses import astuple

import torch
from torch import Tensor

from ryzanstein.worker.kernels.functions.declaring import declared, integers, pointers
from ryzanstein.worker.kernels.functions.draw import Draw


class _Draw(Structure):
    """The struct Draw of draw.c."""

    _fields_ = (
        *((name, c_int64) for name in ("row", "bits", "top_k", "least")),
        *((name, c_double) for name in ("rate", "top_p", "uniform")),
    )


class SamplingFunctions:
    """The functions of draw.c."""

    def __init__(self, library: CDLL) -> None:
        self._greatest = declared(library, "greatest", *pointers(3), *integers(3))
        logits, allowed, out = ((c_void_p, c_int64),) * 3
        self._restrict_rows = declared(library, "restrict_rows", *logits, *allowed, *out, c_int64)
        drawn = c_void_p, *integers(2), POINTER(_Draw), c_void_p, c_int64
        self._draw_rows = declared(library, "draw_rows", *drawn, returns=c_int)

    def greatest(self, logits_SV: Tensor) -> tuple[Tensor, Tensor]:
        """Returns each row's greatest logit, or NaN if it has one, and the lowest token with it."""
        logits_SV = _rowwise(logits_SV)
        num_rows, size = logits_SV.shape
        best_S, token_S = torch.empty(num_rows), torch.empty(num_rows, dtype=torch.int64)
        pointers = logits_SV.data_ptr(), best_S.data_ptr(), token_S.data_ptr()
        self._greatest(*pointers, num_rows, logits_SV.stride(0), size)
        return best_S, token_S

    def restrict(self, logits_SV: Tensor, allowed_SW: Tensor) -> Tensor:
        """Returns a copy of float32 logits, minus infinity where the bit of a token is not set.

        `allowed_SW` has 32 tokens in each int32, the first in the lowest bit.
        """
        logits_SV, allowed_SW = _rowwise(logits_SV), _rowwise(allowed_SW)
        num_rows, size = logits_SV.shape
        out_SV = torch.empty(num_rows, size)
        sources = logits_SV.data_ptr(), logits_SV.stride(0), allowed_SW.data_ptr(), allowed_SW.stride(0)
        self._restrict_rows(*sources, out_SV.data_ptr(), num_rows, size)
        return out_SV

    def draw(self, logits_SV: Tensor, draws_R: Sequence[Draw]) -> Tensor:
        """Returns a token for each draw, [R]; -1 if the greatest logit of its row is not finite.

        Raises MemoryError.
        """
        logits_SV = _rowwise(logits_SV)
        token_R = torch.empty(len(draws_R), dtype=torch.int64)
        arguments = (_Draw * len(draws_R))(*(_Draw(*astuple(draw)) for draw in draws_R))
        source = logits_SV.data_ptr(), logits_SV.stride(0), logits_SV.shape[1]
        if self._draw_rows(*source, arguments, token_R.data_ptr(), len(draws_R)):
            raise MemoryError("no memory for the weights of tokens")
        return token_R


def _rowwise(x_SV: Tensor) -> Tensor:
    """Returns x with the numbers of each row contiguous."""
    return x_SV if x_SV.stride(1) == 1 else x_SV.contiguous()
