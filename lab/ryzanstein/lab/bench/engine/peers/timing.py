"""One batch through one engine, and the prompts that all engines get."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from ryzanstein.lab.bench.engine.flight import Round


@dataclass(frozen=True, slots=True)
class Timing:
    """The times of a batch.

    `ttft_s` is until every prompt has its first token; decode is all after it.

    The memory and the processor time are those of all its processes.
    """

    total_tokens_per_s: float
    decode_tokens_per_s: float
    ttft_s: float
    peak_rss_bytes: int
    cpu_s: float
    first_tokens: tuple[int, ...]

    @classmethod
    def of(cls, answer: Mapping[str, Any], peak_rss_bytes: int, cpu_s: float) -> Self:
        """Returns the timing of a runner's answer."""
        decode_s = max(answer["total_s"] - answer["ttft_s"], 1e-9)
        return cls(
            answer["num_tokens"] / answer["total_s"],
            answer["num_decoded"] / decode_s,
            answer["ttft_s"],
            peak_rss_bytes,
            cpu_s,
            tuple(answer["first_tokens"]),
        )

    @classmethod
    def of_round(cls, done: Round) -> Self:
        """Returns the timing of our own ranks."""
        return cls(
            done.total_tokens_per_s,
            done.decode_tokens_per_s,
            done.ttft_s,
            done.peak_rss_bytes,
            done.cpu_s,
            done.first_tokens,
        )

    @classmethod
    def median(cls, timings: Sequence[Self]) -> Self:
        """Returns the median of several timings of one contender.

        It has the median speed, the most memory, and the first tokens of the first.
        """
        ordered = sorted(timings, key=lambda timing: timing.total_tokens_per_s)
        return replace(
            ordered[(len(ordered) - 1) // 2],
            peak_rss_bytes=max(timing.peak_rss_bytes for timing in timings),
            first_tokens=timings[0].first_tokens,
        )


def prompts(seed: str, batch: int, prompt_tokens: int, vocab_size: int) -> list[list[int]]:
    """Returns the same prompts for the same arguments.

    No two of them share more than a few first tokens, whatever their numbers and lengths.
    """
    ids = random.Random(f"{seed} {batch} {prompt_tokens}")
    return [ids.choices(range(vocab_size), k=prompt_tokens) for _ in range(batch)]
