"""How much faster one contender is than another.

This is the median of the ratios of all rounds that both were in.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Self

from ryzanstein.lab.bench.engine.engine import Load
from ryzanstein.lab.bench.engine.peers.contenders import FULL_PRECISION, OWN, Label
from ryzanstein.lab.bench.engine.peers.timing import Timing

Timings = Mapping[tuple[Label, Load], Mapping[int, Timing]]


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
    """Ours over the peer's. Above 1 ours is better, for times and memory too.

    `decode_tokens_per_s` is None for a load that ends with the first tokens.
    """

    own: Label
    peer: Label
    load: Load
    rounds: int
    total_tokens_per_s: Spread
    decode_tokens_per_s: Spread | None
    ttft: Spread
    cpu: Spread
    peak_rss: Spread


def ratios(timings: Timings) -> list[PeerRatio]:
    """Returns the ratio of each of our configurations to each peer.

    There is one for each load that both have a round of.
    """
    own = [(label, load) for label, load in timings if label.engine == OWN]
    peers = [(label, load) for label, load in timings if label.engine != OWN]
    pairs = [((ours, load), (peer, load)) for ours, load in own for peer, same in peers if same == load]
    return [_ratio(timings, *pair) for pair in pairs if timings[pair[0]].keys() & timings[pair[1]].keys()]


def _ratio(timings: Timings, own: tuple[Label, Load], peer: tuple[Label, Load]) -> PeerRatio:
    ours, theirs = timings[own], timings[peer]
    pairs = [(ours[number], theirs[number]) for number in sorted(ours.keys() & theirs.keys())]
    load = own[1]
    decode = Spread.of(a.decode_tokens_per_s / b.decode_tokens_per_s for a, b in pairs) if load.decodes else None
    return PeerRatio(
        own[0],
        peer[0],
        load,
        len(pairs),
        Spread.of(a.total_tokens_per_s / b.total_tokens_per_s for a, b in pairs),
        decode,
        Spread.of(b.ttft_s / a.ttft_s for a, b in pairs),
        Spread.of(b.cpu_s / a.cpu_s for a, b in pairs),
        Spread.of(b.peak_rss_bytes / a.peak_rss_bytes for a, b in pairs),
    )


def first_tokens_equal(timings: Timings) -> dict[tuple[Label, Load], float]:
    """Returns the share of prompts whose first token equals that of our own full precision.

    It is near 1 if a peer computes the same model. It is empty if our full precision did not run.
    """
    whole = (label for label, _ in sorted(timings) if label.engine == OWN and label.quantization in FULL_PRECISION)
    reference = next(whole, None)
    if reference is None:
        return {}
    return {
        (label, load): _share_equal(rounds, timings[reference, load])
        for (label, load), rounds in timings.items()
        if (reference, load) in timings and rounds.keys() & timings[reference, load].keys()
    }


def _share_equal(rounds: Mapping[int, Timing], reference: Mapping[int, Timing]) -> float:
    shared = rounds.keys() & reference.keys()
    return statistics.mean(
        float(token_id == expected)
        for number in shared
        for token_id, expected in zip(rounds[number].first_tokens, reference[number].first_tokens, strict=True)
    )
