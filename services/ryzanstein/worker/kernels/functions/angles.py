"""The angles by which rotary embeddings turn a step's queries and keys.

Legend: T tokens, R rotated numbers of a head.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Angles:
    """The rotation of a step's tokens. The sine is signed so that rotating needs no negation."""

    cos_T1R: Tensor
    sin_T1R: Tensor
    interleaved: bool
