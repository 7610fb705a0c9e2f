"""Measures this machine's engine alone: `ryzanstein bench engine` without `--peers`.

It uses real ranks under the same group as a node's. Batch sizes are interleaved, so that a slow
minute of the machine does not affect only one of them. The results are medians over the rounds.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ryzanstein import errors
from ryzanstein.generation.request import MAX_CHOICES
from ryzanstein.lab.bench.engine.flight import Engines, Round, losses_as_errors
from ryzanstein.process.allotment import whole_cores
from ryzanstein.worker.ranks.messages import RankSpec
from ryzanstein.worker.settings.rank_settings import ModelSettings, QueueSettings

_BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True, order=True)
class Load:
    """A batch of prompts of one length, and the number of new tokens of each."""

    batch: int
    prompt_tokens: int
    new_tokens: int

    @property
    def num_tokens(self) -> int:
        """The tokens of a sequence, prompt and answer."""
        return self.prompt_tokens + self.new_tokens

    @property
    def decodes(self) -> bool:
        return self.new_tokens > 1

    def __str__(self) -> str:
        return f"batch {self.batch}" if self.decodes else f"{self.batch} x {self.prompt_tokens} in, 1 out"


@dataclass(frozen=True, slots=True)
class Workload:
    """What is measured: the batches, and the number of tokens of each prompt and answer.

    `prefill_tokens`, if not 0, is the length of one more prompt, whose first token alone is waited for.
    """

    batches: tuple[int, ...]
    prompt_tokens: int
    new_tokens: int
    rounds: int
    prefill_tokens: int = 0

    @property
    def loads(self) -> tuple[Load, ...]:
        """The batches in order, then the prompt of `prefill_tokens`."""
        batches = [Load(batch, self.prompt_tokens, self.new_tokens) for batch in self.batches]
        return (*batches, Load(1, self.prefill_tokens, 1)) if self.prefill_tokens else tuple(batches)

    @property
    def num_tokens(self) -> int:
        """The most tokens of a sequence, prompt and answer."""
        return max(load.num_tokens for load in self.loads)

    def check(self, context_length: int) -> None:
        """Raises INVALID_ARGUMENT with the parameter or the numbers that do not fit."""
        if min(self.batches) < 1:
            raise errors.invalid("batch", "must be at least 1", min(self.batches))
        if self.num_tokens > context_length:
            longest = max(self.loads, key=lambda load: load.num_tokens)
            raise errors.context_too_long(longest.prompt_tokens, longest.new_tokens, context_length)


@dataclass(frozen=True, slots=True)
class EngineResult:
    """Medians over the rounds of one batch size.

    The peak is the highest of any round, of all ranks together.
    """

    engine: str
    quantization: str
    tp: int
    batch: int
    prompt_tokens: int
    new_tokens: int
    total_tokens_per_s: float
    decode_tokens_per_s: float
    ttft_s: float
    peak_rss_bytes: int


async def measure(workload: Workload, spec: RankSpec, vocab_size: int, console: Console) -> list[EngineResult]:
    """Runs every batch size once per round, after one batch that is not counted."""
    rounds: dict[int, list[Round]] = {batch: [] for batch in workload.batches}
    async with Engines(spec, vocab_size) as engines:
        await engines.run(workload.batches[0], workload.prompt_tokens, workload.new_tokens)
        for number in range(workload.rounds):
            for batch, done in rounds.items():
                done.append(await engines.run(batch, workload.prompt_tokens, workload.new_tokens))
                console.print(f"round {number + 1}, batch {batch}: {done[-1].total_tokens_per_s:.1f} tokens/s")
    return [_result(workload, spec, batch, done) for batch, done in rounds.items()]


def _result(workload: Workload, spec: RankSpec, batch: int, rounds: Sequence[Round]) -> EngineResult:
    return EngineResult(
        engine="ryzanstein",
        quantization=spec.settings.quantization,
        tp=spec.tp,
        batch=batch,
        prompt_tokens=workload.prompt_tokens,
        new_tokens=workload.new_tokens,
        total_tokens_per_s=statistics.median(done.total_tokens_per_s for done in rounds),
        decode_tokens_per_s=statistics.median(done.decode_tokens_per_s for done in rounds),
        ttft_s=statistics.median(done.ttft_s for done in rounds),
        peak_rss_bytes=max(done.peak_rss_bytes for done in rounds),
    )


def rank_spec(model: Path, workload: Workload, tp: int, threads: int, max_tokens_per_step: int) -> RankSpec:
    """Returns ranks whose cache holds the largest load, with a spare block for each sequence."""
    largest = max(workload.batches)
    return RankSpec(
        model=str(model),
        tp=tp,
        threads=threads or max(1, whole_cores() // tp),
        settings=ModelSettings(
            block_size=_BLOCK_SIZE,
            num_blocks=max(load.batch * (-(-load.num_tokens // _BLOCK_SIZE) + 1) for load in workload.loads),
            max_sequences=largest,
            max_tokens_per_step=max(max_tokens_per_step, largest),
        ),
        queue=QueueSettings(max_waiting=max(MAX_CHOICES, largest)),
        log_level="warning",
    )


def table(results: Sequence[EngineResult]) -> Table:
    """Returns the table for people."""
    visible = Table(title="engine", title_justify="left")
    for heading in ("weights", "tp", "batch", "prompt", "new", "tokens/s", "decode tokens/s", "first tokens", "peak memory"):
        visible.add_column(heading, justify="right")
    for result in results:
        visible.add_row(
            *map(str, (result.quantization, result.tp, result.batch, result.prompt_tokens, result.new_tokens)),
            f"{result.total_tokens_per_s:.1f}",
            f"{result.decode_tokens_per_s:.1f}",
            f"{result.ttft_s * 1e3:.0f} ms",
            f"{result.peak_rss_bytes / 2**20:.0f} MiB",
        )
    return visible


def integers(name: str, text: str) -> tuple[int, ...]:
    """Parses `1,4,8`; each number once. Raises INVALID_ARGUMENT with the option."""
    try:
        return tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError as error:
        raise errors.invalid(name, "must be comma-separated integers", text) from error


def batches(text: str) -> tuple[int, ...]:
    return integers("batch", text)


def run_engine(workload: Workload, spec: RankSpec, vocab_size: int, console: Console) -> list[EngineResult]:
    """Measures. Raises RyzansteinError, also for ranks that refuse the model or are lost."""
    with losses_as_errors():
        return asyncio.run(measure(workload, spec, vocab_size, console))
