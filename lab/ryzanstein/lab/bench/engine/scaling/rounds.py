"""Loads on layouts: real ranks of every layout run at the same time and take turns, round by round.

A slow second of the machine affects one round of one layout. Ratios are therefore taken within a
round, and their median counts. The module does not know what the figures should be.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace
from rich.console import Console

from ryzanstein.lab.bench.engine.engine import Workload, rank_spec
from ryzanstein.lab.bench.engine.flight import Engines
from ryzanstein.lab.bench.engine.scaling.layouts import RankLayout
from ryzanstein.worker.ranks.messages import RankSpec
from ryzanstein.worker.settings.quantization import Quantization

_TOKENS_PER_STEP = 512


@dataclass(frozen=True, slots=True)
class ScalingLoad:
    """Sequences that run at once, each with a prompt and new tokens.

    Of a prefill, the one new token is the prompt's.
    """

    name: str
    batch: int
    prompt_tokens: int
    new_tokens: int

    @classmethod
    def decode(cls, batch: int, steps: int) -> ScalingLoad:
        """Returns a load with prompts of one token, so that the prefill is a step like others."""
        return cls(f"decode-{batch}", batch, 1, steps)

    @classmethod
    def prefill(cls, num_tokens: int) -> ScalingLoad:
        return cls(f"prefill-{num_tokens}", 1, num_tokens, 1)

    @property
    def num_tokens(self) -> int:
        """Returns the tokens that count: those fed in a prefill, otherwise those generated."""
        return self.prompt_tokens if self.new_tokens == 1 else self.batch * self.new_tokens


@dataclass(frozen=True, slots=True)
class ScalingSample:
    """One load on one layout, once.

    `waits_s`: each rank's time in collectives, including waits for late peers.
    """

    num_tokens: int
    elapsed_s: float
    waits_s: tuple[float, ...]

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.elapsed_s

    @property
    def shares(self) -> tuple[float, ...]:
        """Returns the shares of each rank's time.

        The smallest is nearest to the cost of communication, because that rank waited least.
        """
        return tuple(wait_s / self.elapsed_s for wait_s in self.waits_s)


Samples = Mapping[RankLayout, Mapping[ScalingLoad, Sequence[ScalingSample]]]


@dataclass(frozen=True, slots=True)
class Bench:
    """A model and how its ranks hold it."""

    model: Path
    vocab_size: int
    quantization: Quantization
    collectives: str

    def spec(self, layout: RankLayout, loads: Sequence[ScalingLoad]) -> RankSpec:
        """Returns a specification for CPUs, with a cache that holds the largest load."""
        workloads = [Workload((load.batch,), load.prompt_tokens, load.new_tokens, 1) for load in loads]
        specs = [rank_spec(self.model, workload, layout.ranks, layout.threads, _TOKENS_PER_STEP) for workload in workloads]
        largest = max(specs, key=lambda spec: spec.settings.max_sequences)
        num_blocks = max(spec.settings.num_blocks or 0 for spec in specs)
        return replace(
            largest,
            settings=dataclasses.replace(largest.settings, num_blocks=num_blocks, quantization=self.quantization),
            device="cpu",
            collectives=self.collectives,
            pin=layout.pinned,
        )

    async def measure(
        self, layouts: Sequence[RankLayout], loads: Sequence[ScalingLoad], rounds: int, console: Console
    ) -> Samples:
        """Runs every load on every layout once per round, after a short run that is not counted.

        Ranks warm up on their own. Raises RanksRefused or RanksLost.
        """
        samples: dict[RankLayout, dict[ScalingLoad, list[ScalingSample]]] = {
            layout: {load: [] for load in loads} for layout in layouts
        }
        async with AsyncExitStack() as stack:
            engines = {}
            for layout in layouts:
                console.print(f"loading {layout}")
                ranks = Engines(self.spec(layout, loads), self.vocab_size)
                engines[layout] = await stack.enter_async_context(ranks)
                await ranks.run(1, 1, 2)
            for number in range(rounds):
                console.print(f"round {number + 1} of {rounds}")
                for load in loads:
                    for layout in layouts:
                        samples[layout][load].append(await _run(engines[layout], load))
        return samples


async def _run(engines: Engines, load: ScalingLoad) -> ScalingSample:
    before_s = engines.collectives_s()
    done = await engines.run(load.batch, load.prompt_tokens, load.new_tokens)
    waits_s = tuple(after_s - begun_s for begun_s, after_s in zip(before_s, engines.collectives_s(), strict=True))
    elapsed_s = load.batch * load.new_tokens / done.total_tokens_per_s
    return ScalingSample(load.num_tokens, elapsed_s, waits_s)
