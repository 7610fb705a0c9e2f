"""A model whose logits are wanted after every token, and our own engine as one.

Legend: T tokens, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import Tensor

from ryzanstein.generation.request import SamplingParams
from ryzanstein.worker.collectives.local import LocalCollectives
from ryzanstein.worker.collectives.parallel import TensorParallel
from ryzanstein.worker.engine.plan import SampleRow
from ryzanstein.worker.model.loading import slice_bytes
from ryzanstein.worker.model.runner import ModelRunner
from ryzanstein.worker.settings.options import RunnerOptions
from ryzanstein.worker.settings.quantization import Quantization

_BLOCK_SIZE = 16
_ALONE = TensorParallel(0, 1, LocalCollectives())
_GREEDY = SampleRow(SamplingParams(temperature=0), 0, 0, (), ())


@dataclass(frozen=True, slots=True)
class ModelRoom:
    """What a model must have room for: a sequence's tokens, the tokens of a call, and its threads."""

    max_tokens: int
    at_once: int
    threads: int


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of one run: for a prompt, and for all tokens after the first."""

    prefill_s: float
    decode_s: float


class ScoredModel(Protocol):
    """A model with one sequence."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def memory_bytes(self) -> int:
        """The size of the weights in memory."""
        ...

    def restart(self) -> None:
        """Begins a new sequence."""
        ...

    def advance(self, token_ids: Sequence[int]) -> Tensor:
        """Appends at most `ModelRoom.at_once` tokens. Returns the logits after each, [T, V], float32.

        They are valid until the next call.
        """
        ...

    def time(self, prompt_ids: Sequence[int], new_tokens: int) -> Times:
        """Generates greedily in a new sequence and measures it."""
        ...

    def close(self) -> None:
        """Frees the model."""
        ...


class OwnModel:
    """Our engine with one rank, in this process."""

    def __init__(self, path: Path, quantization: Quantization, room: ModelRoom) -> None:
        """Raises ModelRefused."""
        self._runner = ModelRunner.load(path, _ALONE, own_options(quantization, room))
        self.memory_bytes = own_bytes(path, self._runner.quantization, room)
        self.vocab_size = self._runner.vocab_size
        self._table = range(self._runner.num_blocks // len(self._runner.extents.windows))
        self._num_read = 0

    def restart(self) -> None:
        self._num_read = 0

    def advance(self, token_ids: Sequence[int]) -> Tensor:
        """Every token is a sequence of its own in the plan, all with the same blocks.

        A layer stores the keys of a step before it reads them: each token sees those before it. With
        our own kernels these are the bits of a whole prompt.
        """
        count = len(token_ids)
        context = list(range(self._num_read, self._num_read + count))
        pages = self._table[: self._runner.extents.pages(self._num_read + count)]
        plan = self._runner.plans.plan(
            list(token_ids), [1] * count, context, [pages] * count, list(range(count)), full_logits=True
        )
        self._num_read += count
        logits_TV = self._runner.hidden_logits(plan)
        assert logits_TV is not None
        return logits_TV

    def time(self, prompt_ids: Sequence[int], new_tokens: int) -> Times:
        began_s = time.perf_counter()
        latest = self._step(prompt_ids, 0)
        first_s = time.perf_counter()
        for place in range(new_tokens - 1):
            latest = self._step([latest], len(prompt_ids) + place)
        return Times(first_s - began_s, time.perf_counter() - first_s)

    def close(self) -> None:
        del self._runner

    def _step(self, token_ids: Sequence[int], num_context: int) -> int:
        plan = self._runner.plans.plan(list(token_ids), [len(token_ids)], [num_context], [self._table], [0])
        return self._runner.execute(plan, [_GREEDY])[0].token_id


def own_options(quantization: Quantization, room: ModelRoom) -> RunnerOptions:
    return RunnerOptions(
        block_size=_BLOCK_SIZE,
        num_blocks=-(-room.max_tokens // _BLOCK_SIZE),
        max_sequences=room.at_once,
        max_tokens_per_step=room.max_tokens,
        num_threads=room.threads,
        quantization=quantization,
    )


def own_bytes(path: Path, quantization: Quantization, room: ModelRoom) -> int:
    """Returns the size of the weights in memory, from shapes alone: at most, if the format is to be chosen.

    Raises ModelRefused.
    """
    return slice_bytes(path, _ALONE, own_options("none" if quantization == "auto" else quantization, room))
