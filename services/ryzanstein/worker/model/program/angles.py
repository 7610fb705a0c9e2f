"""The rotary angles of a step: a program's own, in memory that stays where it is, or those that Python computes.

Legend: T tokens, R rotated numbers of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from ryzanstein.worker.kernels.functions.rows import Angles
from ryzanstein.worker.kernels.functions.steps.program import AnglesStruct
from ryzanstein.worker.model.program.sizes import MOST_ROWS


class StepAngles:
    """The angles of `number` rotary embeddings: by the ops of those in `rotaries`, or all by the function `compute`."""

    def __init__(
        self,
        number: int,
        rotaries: Mapping[int, tuple[int, bool]],
        compute: Callable[[Tensor], Sequence[Angles]] | None,
    ) -> None:
        self._compute = compute
        self.structs = (AnglesStruct * max(number, 1))()
        self._own = [] if compute is not None else [_memory(*rotaries[index]) for index in range(number)]
        if compute is None:
            self._fill(self._own)
        self._by_tokens: dict[int, Sequence[Angles]] = {}

    @property
    def change(self) -> bool:
        """Whether Python computes them for each step."""
        return self._compute is not None

    def of(self, positions_T: Tensor) -> Sequence[Angles]:
        """Returns the angles of a step's positions, which ops may still have to compute."""
        if self._compute is not None:
            angles = self._compute(positions_T)
            self._fill(angles)
            return angles
        num_tokens = len(positions_T)
        if num_tokens not in self._by_tokens:
            self._by_tokens[num_tokens] = [
                Angles(own.cos_T1R[:num_tokens], own.sin_T1R[:num_tokens], own.interleaved) for own in self._own
            ]
        return self._by_tokens[num_tokens]

    def _fill(self, angles: Sequence[Angles]) -> None:
        for index, each in enumerate(angles):
            struct = self.structs[index]
            struct.cos, struct.sin = each.cos_T1R.data_ptr(), each.sin_T1R.data_ptr()
            struct.num_rotated, struct.interleaved = each.cos_T1R.shape[-1], each.interleaved


def _memory(width: int, interleaved: bool) -> Angles:
    cos_T1R, sin_T1R = torch.zeros(2, MOST_ROWS, 1, width)
    return Angles(cos_T1R, sin_T1R, interleaved)
