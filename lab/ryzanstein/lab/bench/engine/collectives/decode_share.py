"""How much of a model's decode step is communication.

Real ranks under load report their own time in collectives.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace
from rich.console import Console
from rich.table import Table

from ryzanstein import errors
from ryzanstein.lab.bench.engine.engine import Workload, rank_spec
from ryzanstein.lab.bench.engine.flight import Engines, Round, losses_as_errors
from ryzanstein.worker.ranks.messages import RankSpec
from ryzanstein.worker.text.model_files import ModelFiles

_BATCHES = (1, 8)
_PROMPT_TOKENS = 1  # so that the prefill is a step like all others
_HOST_BACKENDS = ("shm", "gloo")


@dataclass(frozen=True, slots=True)
class DecodeShare:
    """The share of communication in the decode steps of one batch size.

    `communication_share` is rank 0's time in collectives, including waits for slower ranks, over
    its steps' time: the median of the rounds.
    """

    backend: str
    batch: int
    step_p50_s: float
    communication_share: float


@dataclass(frozen=True, slots=True)
class DecodeLoad:
    """Batches that decode on the ranks of each backend in turn.

    The model is loaded once per backend, and all are loaded at the same time.
    """

    workload: Workload
    specs: Mapping[str, RankSpec]
    vocab_size: int

    @classmethod
    def plan(cls, model: Path, specs: Mapping[str, RankSpec], steps: int, rounds: int) -> DecodeLoad:
        """Plans `steps` decode steps per round. `specs` is by backend.

        NCCL is left out, because the host's clock sees when a collective is queued, not when it
        runs. Raises INVALID_ARGUMENT if no backend remains or the steps exceed the context, and
        what reading the model raises.
        """
        files = ModelFiles.read(model)
        workload = Workload(_BATCHES, _PROMPT_TOKENS, steps, rounds)
        workload.check(files.context_length)
        chosen = {backend: spec for backend, spec in specs.items() if backend in _HOST_BACKENDS}
        if not chosen:
            raise errors.invalid("backends", f"the decode share requires {' or '.join(_HOST_BACKENDS)}")
        loaded = {backend: _with_model(spec, model, workload) for backend, spec in chosen.items()}
        return cls(workload, loaded, files.vocab_size)

    def run(self, console: Console) -> list[DecodeShare]:
        """Measures. Raises FAILED_PRECONDITION for ranks that refuse the model or are lost."""
        with losses_as_errors():
            return asyncio.run(self._measure(console))

    async def _measure(self, console: Console) -> list[DecodeShare]:
        rounds: dict[tuple[str, int], list[Round]] = {(b, batch): [] for batch in _BATCHES for b in self.specs}
        async with AsyncExitStack() as stack:
            engines = {b: await stack.enter_async_context(Engines(spec, self.vocab_size)) for b, spec in self.specs.items()}
            for engine in engines.values():
                await engine.run(max(_BATCHES), self.workload.prompt_tokens, self.workload.new_tokens)
            for number in range(self.workload.rounds):
                console.print(f"decode steps, round {number + 1} of {self.workload.rounds}")
                for (backend, batch), done in rounds.items():
                    done.append(await engines[backend].run(batch, self.workload.prompt_tokens, self.workload.new_tokens))
        return [_share(backend, batch, done) for (backend, batch), done in rounds.items()]


def _with_model(spec: RankSpec, model: Path, workload: Workload) -> RankSpec:
    """Returns a specification for CPUs, with a cache that holds the largest batch."""
    sized = rank_spec(model, workload, spec.tp, spec.threads, max(_BATCHES))
    return replace(sized, device="cpu", collectives=spec.collectives, pin=spec.pin)


def _share(backend: str, batch: int, rounds: Sequence[Round]) -> DecodeShare:
    step_p50_s = statistics.median(step_s for done in rounds for step_s in done.step_times_s)
    share = statistics.median(done.collectives_s / sum(done.step_times_s) for done in rounds)
    return DecodeShare(backend, batch, step_p50_s, share)


def table(shares: Sequence[DecodeShare]) -> Table:
    """Returns the table for people."""
    visible = Table(title="communication in decode steps", title_justify="left")
    for heading in ("batch", "backend", "step p50", "communication"):
        visible.add_column(heading, justify="right")
    for share in shares:
        step, part = f"{share.step_p50_s * 1e3:.2f} ms", f"{share.communication_share:.0%}"
        visible.add_row(str(share.batch), share.backend, step, part)
    return visible
