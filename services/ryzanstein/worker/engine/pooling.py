"""Makes one vector of a prompt's hidden states, as they are computed: the last one, or their mean.

A mean adds its rows one after the other, in double precision. So it does not depend on the steps
into which a prompt was divided, and with them on what else was computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

Pooling = Literal["mean", "last"]


class Pool:
    """The hidden states of one prompt so far. That of token `first` is the next to be added."""

    def __init__(self, pooling: Pooling, num_prompt: int) -> None:
        self.first = 0 if pooling == "mean" else num_prompt - 1
        self._sum: npt.NDArray[np.float64] | None = None
        self._num = 0

    def add(self, rows: Sequence[bytes]) -> None:
        """Adds hidden states, each as numbers in single precision."""
        for row in rows:
            numbers = np.frombuffer(row, np.float32).astype(np.float64)
            self._sum = numbers if self._sum is None else np.add(self._sum, numbers, out=self._sum)
            self._num += 1
            self.first += 1

    def vector(self) -> bytes:
        """Returns the mean of what was added, as numbers in single precision."""
        if self._sum is None:
            raise ValueError("nothing was added")
        return (self._sum / self._num).astype(np.float32).tobytes()
