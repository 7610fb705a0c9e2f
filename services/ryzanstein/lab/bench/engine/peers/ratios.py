"""How much faster one contender is than another.

This is the median of the ratios of all rounds that both were in.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Self

from ryzanstein.lab.bench.engine.peers.contenders import OWN, Label
from ryzanstein.lab.bench.engine.peers.timing import Timing

Timings = Mapping[tuple[Label, int], Mapping[int, Timing]]


@dataclass(frozen=True, slots=True)
class Spread:
    median: float
    min: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Self:
        listed = list(values)
        return cls(statistics.median(listed), min(listed), max(listed))


@dataclass(frozen=True, slots=True)
class PeerRatio:
    """Ours over the peer's. Above 1 ours is faster, for throughput and first tokens alike."""

    own: Label
    peer: Label
    batch: int
    rounds: int
    total_tokens_per_s: Spread
    ttft: Spread


def ratios(timings: Timings) -> list[PeerRatio]:
    """Returns the ratio of each of our configurations to each peer.

    There is one for each batch size that both have a round of.
    """
    own = [(label, batch) for label, batch in timings if label.engine == OWN]
    peers = [(label, batch) for label, batch in timings if label.engine != OWN]
    pairs = [((ours, batch), (peer, batch)) for ours, batch in own for peer, size in peers if size == batch]
    return [_ratio(timings, *pair) for pair in pairs if timings[pair[0]].keys() & timings[pair[1]].keys()]


def _ratio(timings: Timings, own: tuple[Label, int], peer: tuple[Label, int]) -> PeerRatio:
    ours, theirs = timings[own], timings[peer]
    shared = sorted(ours.keys() & theirs.keys())
    return PeerRatio(
        own[0],
        peer[0],
        own[1],
        len(shared),
        Spread.of(ours[number].total_tokens_per_s / theirs[number].total_tokens_per_s for number in shared),
        Spread.of(theirs[number].ttft_s / ours[number].ttft_s for number in shared),
    )


def first_tokens_equal(timings: Timings) -> dict[tuple[Label, int], float]:
    """Returns the share of prompts whose first token equals that of our own full precision.

    It is near 1 if a peer computes the same model. It is empty if our full precision did not run.
    """
    reference = next((label for label, _ in sorted(timings) if label.engine == OWN and label.quantization == "none"), None)
    if reference is None:
        return {}
    return {
        (label, batch): _share_equal(rounds, timings[reference, batch])
        for (label, batch), rounds in timings.items()
        if (reference, batch) in timings and rounds.keys() & timings[reference, batch].keys()
    }


def _share_equal(rounds: Mapping[int, Timing], reference: Mapping[int, Timing]) -> float:
    shared = rounds.keys() & reference.keys()
    return statistics.mean(
        float(token_id == expected)
        for number in shared
        for token_id, expected in zip(rounds[number].first_tokens, reference[number].first_tokens, strict=True)
    )
