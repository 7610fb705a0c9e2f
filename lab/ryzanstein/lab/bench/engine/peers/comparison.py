"""Rounds in which every contender has its own turn: started, warmed up, measured, ended.

It is measured at every load. The order moves on by one each round. All get the same prompts, and
those of a round are new to all. A round begins with how fast two or more threads read the memory.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rich.console import Console

from ryzanstein.errors import RyzansteinError
from ryzanstein.lab.bench.engine.engine import Load, Workload
from ryzanstein.lab.bench.engine.peers.contenders import Contender, Label, Running
from ryzanstein.lab.bench.engine.peers.process import PeerFailed
from ryzanstein.lab.bench.engine.peers.timing import Timing, prompts
from ryzanstein.lab.bench.engine.reference_ceilings import read_bytes_per_s

_WARM_UP_TOKENS = 2048  # of a batch's prompts together
_WARM_UP_NEW_TOKENS = 3
_ENOUGH_S, _MOST_REPEATS = 2.0, 9


@dataclass(frozen=True, slots=True)
class PeerOutcome:
    """The results.

    `timings` is by contender and load, then by round; one that failed may lack some.
    `read_bytes_per_s` has what the threads read from memory at the beginning of each round.
    """

    timings: dict[tuple[Label, Load], dict[int, Timing]] = field(default_factory=dict)
    failed: dict[Label, str] = field(default_factory=dict)
    facts: dict[Label, Mapping[str, str]] = field(default_factory=dict)
    read_bytes_per_s: list[float] = field(default_factory=list)


class PeerComparison:
    """A comparison of contenders. `run` it once."""

    def __init__(
        self, contenders: Sequence[Contender], workload: Workload, threads: int, vocab_size: int, people: Console
    ) -> None:
        self._contenders = contenders
        self._workload = workload
        self._threads = threads
        self._vocab_size = vocab_size
        self._people = people
        self._outcome = PeerOutcome()

    async def run(self) -> PeerOutcome:
        """Runs all rounds. A contender that fails is left out from then on; the others continue."""
        for number in range(self._workload.rounds):
            self._outcome.read_bytes_per_s.append(read_bytes_per_s(self._threads))
            for contender in self._order(number):
                if contender.label not in self._outcome.failed:
                    await self._turn(contender, number)
        return self._outcome

    def _order(self, number: int) -> list[Contender]:
        first = number % len(self._contenders)
        return [*self._contenders[first:], *self._contenders[:first]]

    async def _turn(self, contender: Contender, number: int) -> None:
        self._people.print(f"round {number + 1} of {self._workload.rounds}: {contender.label}")
        try:
            async with contender.turn() as running:
                self._outcome.facts[contender.label] = running.facts
                for load in self._workload.loads:
                    await self._warm_up(running, load)
                    await self._measure(running, contender.label, load, number)
        except (PeerFailed, RyzansteinError, OSError) as error:
            self._outcome.failed[contender.label] = str(error)
            self._people.print(f"  failed: {error}", markup=False)

    async def _warm_up(self, running: Running, load: Load) -> None:
        """Warms up buffers, caches and compiled shapes.

        Of long prompts only the beginning is used.
        """
        prompt_tokens = max(1, min(load.prompt_tokens, _WARM_UP_TOKENS // load.batch))
        new_tokens = min(load.new_tokens, _WARM_UP_NEW_TOKENS)
        await running.generate(prompts("warm-up", load.batch, prompt_tokens, self._vocab_size), new_tokens)

    async def _measure(self, running: Running, label: Label, load: Load, number: int) -> None:
        """Measures a load for a while and records the median run.

        Small models answer in a tenth of a second, with times that vary.
        """
        began, timings = time.monotonic(), list[Timing]()
        while not timings or (time.monotonic() - began < _ENOUGH_S and len(timings) < _MOST_REPEATS):
            batch_prompts = prompts(f"round {number}.{len(timings)}", load.batch, load.prompt_tokens, self._vocab_size)
            timings.append(await running.generate(batch_prompts, load.new_tokens))
        timing = Timing.median(timings)
        self._outcome.timings.setdefault((label, load), {})[number] = timing
        self._people.print(f"  {load}: {timing.total_tokens_per_s:.1f} tokens/s, first tokens {timing.ttft_s * 1e3:.0f} ms")
