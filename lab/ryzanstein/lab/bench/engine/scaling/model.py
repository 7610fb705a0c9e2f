"""Time of a step as a function of the number of ranks.

It is the slower of memory and arithmetic, plus what is not shared, plus messages:

    t(n) = max(read(n) / bandwidth(n), flops(n) / arithmetic(n)) + unsplit + reduces * all_reduce(bytes, n) + gather(n)

The first term is Williams et al.'s roofline (2009) with one rank's share of the work. Nothing
overlaps with communication, because the engine overlaps nothing. Plain arithmetic: it measures
nothing and knows no model.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from ryzanstein import errors
from ryzanstein.lab.bench.engine.scaling.work import RankWork

Points = tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Latencies:
    """Seconds of a message by its size.

    There are two points or more, ascending in bytes. Values are linear between and beyond them, and
    below the first point equal to it.
    """

    points: Points

    def __post_init__(self) -> None:
        """Raises ValueError for points that do not ascend, or too few."""
        if len(self.points) < 2 or any(low[0] >= high[0] for low, high in pairwise(self.points)):
            raise ValueError(f"latencies need two or more ascending sizes, got {[size for size, _ in self.points]}")

    def seconds(self, num_bytes: int) -> float:
        sizes = [size for size, _ in self.points]
        above = min(max(1, bisect_left(sizes, num_bytes)), len(sizes) - 1)
        (low, low_s), (high, high_s) = self.points[above - 1 : above + 1]
        return low_s + (high_s - low_s) * max(0, num_bytes - low) / (high - low)


@dataclass(frozen=True, slots=True)
class Hardware:
    """What one rank gets while `n` ranks work, by n; `all_reduce` has no entry for one rank.

    `unsplit_s` is by step; a missing one is unknown and counts as 0.
    """

    name: str
    read_bytes_per_s: Mapping[int, float]
    flops_per_s: Mapping[int, float]
    all_reduce: Mapping[int, Latencies]
    unsplit_s: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Prediction:
    """Seconds of one step, and their parts."""

    load: str
    ranks: int
    memory_s: float
    arithmetic_s: float
    unsplit_s: float
    all_reduce_s: float
    gather_s: float

    @property
    def work_s(self) -> float:
        """Returns what is divided over the ranks: the slower of memory and arithmetic."""
        return max(self.memory_s, self.arithmetic_s)

    @property
    def step_s(self) -> float:
        """Returns the time with products as fast as memory or arithmetic: no step is faster."""
        return self.fitted_s(1.0)

    def fitted_s(self, efficiency: float) -> float:
        """Returns the time with products that reach this share of that speed."""
        return self.work_s / efficiency + self.unsplit_s + self.communication_s

    def efficiency(self, measured_s: float) -> float:
        """Returns the share that products reached in a step that took `measured_s`.

        It is above 1 if weights come from a cache.
        """
        return self.work_s / (measured_s - self.unsplit_s - self.communication_s)

    @property
    def communication_s(self) -> float:
        return self.all_reduce_s + self.gather_s

    @property
    def communication_share(self) -> float:
        return self.communication_s / self.step_s


def predict(hardware: Hardware, load: str, work: RankWork, ranks: int) -> Prediction:
    """Predicts a step. Raises INVALID_ARGUMENT for a number of ranks without figures.

    A gather of the few bytes that a greedy step exchanges counts as an all-reduce of that size.
    """
    if ranks not in hardware.read_bytes_per_s or ranks not in hardware.flops_per_s:
        raise errors.invalid("ranks", f"{hardware.name} has figures for {sorted(hardware.read_bytes_per_s)}", ranks)
    latencies = hardware.all_reduce.get(ranks)
    if ranks > 1 and latencies is None:
        raise errors.invalid("ranks", f"{hardware.name} has all-reduces of {sorted(hardware.all_reduce)}", ranks)
    return Prediction(
        load,
        ranks,
        work.read_bytes / hardware.read_bytes_per_s[ranks],
        work.flops / hardware.flops_per_s[ranks],
        hardware.unsplit_s.get(load, 0.0),
        0.0 if latencies is None else work.num_all_reduces * latencies.seconds(work.all_reduce_bytes),
        0.0 if latencies is None else latencies.seconds(work.gather_bytes),
    )
