"""When the tokens of an answer came: a bounded number of samples, coarser the longer the answer takes."""

from __future__ import annotations

MOST_SAMPLES = 1000
MOST_PARTS = MOST_SAMPLES // 2
"""Parts behind it count as one: each has a sample at least."""
_FIRST_GRAIN_MS = 20


class Timeline:
    """Samples of milliseconds since the question, the number of a part, and tokens of that part that came then.

    A time without tokens has no sample: a gap stays a gap, to the grain.
    """

    def __init__(self) -> None:
        self.samples: list[tuple[int, int, int]] = []
        self._grain_ms = _FIRST_GRAIN_MS

    def add(self, at_ms: int, part: int, tokens: int) -> None:
        """Adds tokens. Times do not become smaller."""
        if tokens:
            _join(self.samples, (at_ms, min(part, MOST_PARTS), tokens), self._grain_ms)
        while len(self.samples) > MOST_SAMPLES:
            self._grain_ms *= 2
            finer, self.samples = self.samples, []
            for sample in finer:
                _join(self.samples, sample, self._grain_ms)


def _join(samples: list[tuple[int, int, int]], sample: tuple[int, int, int], grain_ms: int) -> None:
    """Appends a sample, or adds its tokens to the last one if that is of the same part and close."""
    at_ms, part, tokens = sample
    if samples and samples[-1][1] == part and at_ms - samples[-1][0] < grain_ms:
        first_ms, _, before = samples[-1]
        samples[-1] = (first_ms, part, before + tokens)
    else:
        samples.append(sample)
