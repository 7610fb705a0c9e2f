"""Measures this machine's engine: `ryzanstein bench engine --model DIR`.

Real ranks under the same group as a node's. Batch sizes are interleaved so that a slow minute of the machine does not fall on
one of them; the results are medians over the rounds.
"""

from __future__ import annotations

import asyncio
import os
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from ryzanstein import errors
from ryzanstein.generation import MAX_CHOICES
from ryzanstein.worker.benchmarks.flight import Engines, Round, losses_as_errors
from ryzanstein.worker.benchmarks.report import publish, refusals_as_exit
from ryzanstein.worker.ranks.messages import RankSpec
from ryzanstein.worker.text.model_files import ModelFiles

_BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Workload:
    """What is measured. Prompts and answers of so many tokens each."""

    batches: tuple[int, ...]
    prompt_tokens: int
    new_tokens: int
    rounds: int

    @property
    def num_tokens(self) -> int:
        return self.prompt_tokens + self.new_tokens

    def check(self, context_length: int) -> None:
        """Raises INVALID_ARGUMENT naming the parameter or the numbers that do not fit."""
        if min(self.batches) < 1:
            raise errors.invalid("batch", "must be at least 1", min(self.batches))
        if self.num_tokens > context_length:
            raise errors.context_too_long(self.prompt_tokens, self.new_tokens, context_length)


@dataclass(frozen=True, slots=True)
class Result:
    """Medians over the rounds of one batch size; the peak is the highest of any round, of all ranks together."""

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


async def measure(workload: Workload, spec: RankSpec, vocab_size: int, console: Console) -> list[Result]:
    """Runs every batch size once a round, after one batch that is not counted."""
    rounds: dict[int, list[Round]] = {batch: [] for batch in workload.batches}
    async with Engines(spec, vocab_size) as engines:
        await engines.run(workload.batches[0], workload.prompt_tokens, workload.new_tokens)
        for number in range(workload.rounds):
            for batch, done in rounds.items():
                done.append(await engines.run(batch, workload.prompt_tokens, workload.new_tokens))
                console.print(f"round {number + 1}, batch {batch}: {done[-1].total_tokens_per_s:.1f} tokens/s")
    return [_result(workload, spec.tp, batch, done) for batch, done in rounds.items()]


def _result(workload: Workload, tp: int, batch: int, rounds: Sequence[Round]) -> Result:
    return Result(
        engine="ryzanstein",
        quantization="none",
        tp=tp,
        batch=batch,
        prompt_tokens=workload.prompt_tokens,
        new_tokens=workload.new_tokens,
        total_tokens_per_s=statistics.median(done.total_tokens_per_s for done in rounds),
        decode_tokens_per_s=statistics.median(done.decode_tokens_per_s for done in rounds),
        ttft_s=statistics.median(done.ttft_s for done in rounds),
        peak_rss_bytes=max(done.peak_rss_bytes for done in rounds),
    )


def rank_spec(model: Path, workload: Workload, tp: int, threads: int, max_tokens_per_step: int) -> RankSpec:
    """Ranks whose cache holds the largest batch, with a block in hand for each sequence."""
    largest = max(workload.batches)
    blocks_per_sequence = -(-workload.num_tokens // _BLOCK_SIZE) + 1
    return RankSpec(
        model=str(model),
        tp=tp,
        threads=threads or max(1, len(os.sched_getaffinity(0)) // tp),
        block_size=_BLOCK_SIZE,
        num_blocks=largest * blocks_per_sequence,
        max_sequences=largest,
        max_tokens_per_step=max(max_tokens_per_step, largest),
        max_waiting=max(MAX_CHOICES, largest),
        log_level="warning",
    )


def table(results: Sequence[Result]) -> Table:
    """For people."""
    shown = Table(title="engine", title_justify="left")
    for heading in ("tp", "batch", "prompt", "new", "tokens/s", "decode tokens/s", "first tokens", "peak memory"):
        shown.add_column(heading, justify="right")
    for result in results:
        shown.add_row(
            *map(str, (result.tp, result.batch, result.prompt_tokens, result.new_tokens)),
            f"{result.total_tokens_per_s:.1f}",
            f"{result.decode_tokens_per_s:.1f}",
            f"{result.ttft_s * 1e3:.0f} ms",
            f"{result.peak_rss_bytes / 2**20:.0f} MiB",
        )
    return shown


def batches(text: str) -> tuple[int, ...]:
    """`1,4,8`; each once."""
    try:
        return tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError as error:
        raise errors.invalid("batch", "must be integers with commas between", text) from error


def run_engine(model: Path, workload: Workload, spec: RankSpec, console: Console) -> list[Result]:
    """Raises RyzansteinError, also for ranks that refuse the model or are lost."""
    files = ModelFiles.read(model)
    workload.check(files.context_length)
    with losses_as_errors():
        return asyncio.run(measure(workload, spec, files.vocab_size, console))


def engine(
    *,
    model: Annotated[Path, typer.Option(help="directory of a checkpoint", exists=True, file_okay=False)],
    json_path: Annotated[str, typer.Option("--json", help="write JSON to this file; - is standard output")] = "",
    tp: Annotated[int, typer.Option(min=1, help="ranks")] = 1,
    batch: Annotated[str, typer.Option(help="sequences at once, several with commas between")] = "1,4,8,32",
    prompt_tokens: Annotated[int, typer.Option(min=1)] = 128,
    new_tokens: Annotated[int, typer.Option(min=1)] = 128,
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    threads: Annotated[int, typer.Option(min=0, help="of each rank; 0: the cores divided by the ranks")] = 0,
    max_tokens_per_step: Annotated[int, typer.Option(min=1, help="token budget of a step; at least the batch")] = 512,
    openmp_spins: Annotated[int, typer.Option(min=0, help="looks of a thread before it sleeps; 0: many")] = 0,
) -> None:
    """Tokens per second of the engine and its ranks on this machine."""
    with refusals_as_exit() as people:
        workload = Workload(batches(batch), prompt_tokens, new_tokens, rounds)
        spec = rank_spec(model, workload, tp, threads, max_tokens_per_step)
        spec = msgspec.structs.replace(spec, openmp_spins=openmp_spins)
        results = run_engine(model, workload, spec, people)
        document = {"model": str(model), "results": [asdict(result) for result in results]}
        publish(document, [table(results)], json_path)
