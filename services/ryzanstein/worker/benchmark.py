"""Measures this machine's engine: `python -m ryzanstein.worker.benchmark engine --model DIR`, or `ryzanstein bench engine`.

Real ranks under the same group as a node's, fed and timed where the agent would be; no gRPC and no text. Greedy, end of text
ignored, random prompts of which no two share a block, batch sizes interleaved so that a slow minute of the machine does not
fall on one of them, medians over the rounds.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from ryzanstein import errors
from ryzanstein.errors import RyzansteinError
from ryzanstein.generation import MAX_CHOICES, SamplingParams
from ryzanstein.worker.engine.messages import StepEvents, SubmitGroup
from ryzanstein.worker.ranks.group import GroupBounds, GroupEvents, RankGroup, RanksLost, RanksRefused
from ryzanstein.worker.ranks.messages import RankReady, RankSpec
from ryzanstein.worker.text.model_files import ModelFiles

app = typer.Typer(help="Measure what this machine does.", no_args_is_help=True)

_BLOCK_SIZE = 16
_GREEDY = SamplingParams(temperature=0.0, seed=0, ignore_eos=True)


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
class Round:
    """One batch, run once. `ttft_s` is until the last sequence has its first token, decode is all that comes after it."""

    ttft_s: float
    total_tokens_per_s: float
    decode_tokens_per_s: float
    peak_rss_bytes: int


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


class Flight:
    """One batch on its way through the ranks."""

    def __init__(self, groups: Sequence[int], began_s: float) -> None:
        self._silent = set(groups)
        self._running = set(groups)
        self._began_s = began_s
        self._first_s = 0.0
        self._num_tokens = 0
        self._num_decoded = 0
        self.landed: asyncio.Future[float] = asyncio.get_running_loop().create_future()

    def on_step(self, events: StepEvents, now_s: float) -> None:
        self._num_tokens += len(events.token_ids)
        if not self._silent:
            self._num_decoded += len(events.token_ids)
        elif self._silent.issubset(events.groups):
            self._first_s = now_s
        self._silent.difference_update(events.groups)
        self._running.difference_update(end.group for end in events.ended)
        if events.failed and not self.landed.done():
            self.landed.set_exception(errors.internal(events.failed[0].message))
        if not self._running and not self.landed.done():
            self.landed.set_result(now_s)

    def result(self, peak_rss_bytes: int) -> Round:
        """Once landed."""
        end_s = self.landed.result()
        return Round(
            self._first_s - self._began_s,
            self._num_tokens / (end_s - self._began_s),
            self._num_decoded / max(end_s - self._first_s, 1e-9),
            peak_rss_bytes,
        )


class Engines:
    """Running ranks that are given one batch after the other. As an async context manager it starts and ends them."""

    def __init__(self, spec: RankSpec, vocab_size: int) -> None:
        self._spec = spec
        self._vocab_size = vocab_size
        self._random = random.Random(0)
        self._num_groups = 0
        self._flight: Flight | None = None
        self._group = RankGroup(spec, GroupBounds(), GroupEvents(self._on_step, lambda trace: None, self._pending))
        self.ready: list[RankReady] = []

    async def __aenter__(self) -> Engines:
        try:
            self.ready = await self._group.start()
        except BaseException:
            await self._group.end(graceful=False)
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._group.end(graceful=True)

    async def run(self, batch: int, prompt_tokens: int, new_tokens: int) -> Round:
        """Submits the batch at once and waits for its end. RanksLost when a rank is."""
        prompts = [self._random.choices(range(self._vocab_size), k=prompt_tokens) for _ in range(batch)]
        groups = range(self._num_groups, self._num_groups + batch)
        self._num_groups += batch
        pids = [progress.pid for progress in self._group.progress()]
        for pid in pids:
            _reset_peak_rss(pid)
        flight = self._flight = Flight(groups, time.perf_counter())
        for group, prompt_ids in zip(groups, prompts, strict=True):
            self._group.send(SubmitGroup(group, prompt_ids, _GREEDY, new_tokens, [], [[]], [False]))
        either: list[asyncio.Future[Any]] = [flight.landed, self._group.lost]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not flight.landed.done():
            raise RanksLost(self._group.lost.result())
        return flight.result(sum(map(_peak_rss_bytes, pids)))

    def _on_step(self, events: StepEvents) -> None:
        if self._flight is not None:
            self._flight.on_step(events, time.perf_counter())

    def _pending(self) -> bool:
        return self._flight is not None and not self._flight.landed.done()


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


def _reset_peak_rss(pid: int) -> None:
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def _peak_rss_bytes(pid: int) -> int:
    """VmHWM of proc(5): the most since it was last reset."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


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
    try:
        return asyncio.run(measure(workload, spec, files.vocab_size, console))
    except (RanksRefused, RanksLost) as error:
        raise errors.failed_precondition("RANKS_FAILED", str(error)) from error


@app.callback()
def benchmarks() -> None:
    """Measure what this machine does."""


@app.command()
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
) -> None:
    """Tokens per second of the engine and its ranks on this machine."""
    people = Console(stderr=True, highlight=False)
    try:
        workload = Workload(batches(batch), prompt_tokens, new_tokens, rounds)
        spec = rank_spec(model, workload, tp, threads, max_tokens_per_step)
        results = run_engine(model, workload, spec, people)
    except RyzansteinError as error:
        people.print(f"error {error.code.name} ({error.reason}): {error.message}", markup=False, soft_wrap=True)
        raise typer.Exit(1) from error
    document = json.dumps({"model": str(model), "results": [asdict(result) for result in results]}, indent=2)
    if json_path == "-":
        print(document)
    elif json_path:
        Path(json_path).write_text(document + "\n")
    else:
        Console().print(table(results))


if __name__ == "__main__":
    app()
