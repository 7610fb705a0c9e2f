"""An adapter in memory: two factors for each weight that it changes.

Legend: I inputs, R ranks, O outputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ryzanstein.worker.adapters.tensors import Floats

Shapes = Mapping[str, tuple[int, int]]
"""The inputs and outputs of each weight that takes an adapter, by its name in the checkpoint.

Those of an embedding are tokens and width.
"""


@dataclass(frozen=True, slots=True)
class AdaptedWeight:
    """The factors of one weight in float32: x A^T B^T `scale` is added to its result, and the bias times `scale`."""

    a_RI: Floats
    b_OR: Floats
    bias_O: Floats | None
    scale: float

    @property
    def rank(self) -> int:
        return len(self.a_RI)


@dataclass(frozen=True, slots=True)
class Adapter:
    """A whole adapter: its factors by the name of the weight that they adapt. `base` is the model that its author names."""

    weights: Mapping[str, AdaptedWeight]
    base: str = ""
