"""The suite's small parts: block pool, engine loop without a model, sampler, tokenizer.

They run in the suite's own process. They are the costs of a step besides the model's forward pass.
Each runs for a quarter of a second per round.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch

from ryzanstein.generation.request import SamplingParams
from ryzanstein.lab.bench.engine.suite.rounds import RoundLog, Subject, repeated
from ryzanstein.worker.engine.engine import Engine
from ryzanstein.worker.engine.extents import EngineSettings
from ryzanstein.worker.engine.memory.blocks import BlockPool
from ryzanstein.worker.engine.messages import SubmitGroup
from ryzanstein.worker.engine.plan import PageMove, Rearrangement, SampledToken, SampleRow, StepPlan
from ryzanstein.worker.kernels.native import NativeKernels
from ryzanstein.worker.kernels.opening import open_kernels
from ryzanstein.worker.sampling.sampler import sample
from ryzanstein.worker.settings.options import RunnerOptions
from ryzanstein.worker.text.tokenizer import TextModel

_BLOCKS = 4096
_TURNS = 400
_SEQUENCES = 32
_PROMPT_TOKENS, _NEW_TOKENS = 128, 64
_VOCABULARY = 32_000
_TEXT = "My name is Tavik and I count from 1 to 20: one, two, three. " * 20


class SmallParts:
    """The parts that need no ranks. `model` is a checkpoint whose tokenizer is timed."""

    def __init__(self, model: Path) -> None:
        text = TextModel.load(model)
        token_ids = text.encode(_TEXT)
        logits_SV = torch.randn(_SEQUENCES, _VOCABULARY, generator=torch.Generator().manual_seed(0))
        kernels = open_kernels(RunnerOptions()).native
        greedy, drawn = SamplingParams(temperature=0.0, seed=0), SamplingParams(temperature=0.8, top_p=0.9, seed=0)
        rows = f"{_SEQUENCES} rows of {_VOCABULARY}"
        self._jobs: tuple[tuple[Subject, Callable[[], float]], ...] = (
            (Subject("parts/block-pool", f"one of {_TURNS} pairs of allocate and free, {_BLOCKS} blocks", "loop"), _pool),
            (Subject("parts/engine-step", f"a step of {_SEQUENCES} sequences without a model", "loop"), _steps),
            (Subject("parts/sampler-greedy", rows, "small"), partial(_sample, kernels, logits_SV, greedy)),
            (Subject("parts/sampler-top-p", rows, "small"), partial(_sample, kernels, logits_SV, drawn)),
            (Subject("parts/tokenizer", f"{len(_TEXT)} characters", "loop"), partial(_timed, partial(text.encode, _TEXT))),
            (Subject("parts/detokenizer", f"{len(token_ids)} tokens", "loop"), partial(_detokenize, text, token_ids)),
        )

    async def round(self, log: RoundLog) -> None:
        for subject, job in self._jobs:
            job()
            await log.time([subject], partial(_median, job))


async def _median(job: Callable[[], float]) -> Sequence[float]:
    async def run() -> Mapping[str, float]:
        return {"seconds": job()}

    return ((await repeated(run))["seconds"],)


def _timed(call: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    call()
    return time.perf_counter() - began_s


def _pool() -> float:
    """Allocates runs of 1 to 16 blocks and frees them in random order, with the pool half full."""
    pool, choose = BlockPool(_BLOCKS), random.Random(0)
    held = [pool.allocate(8) for _ in range(_BLOCKS // 16)]
    began_s = time.perf_counter()
    for _ in range(_TURNS):
        pool.free(held.pop(choose.randrange(len(held))))
        held.append(pool.allocate(choose.randint(1, 16)))
    return (time.perf_counter() - began_s) / _TURNS


class _NoModel:
    """An executor that generates the same token for every row."""

    def execute(self, plan: StepPlan, rows: Sequence[SampleRow]) -> Sequence[SampledToken]:
        return [SampledToken(7)] * len(rows)

    def rearrange(self, change: Rearrangement) -> None:
        """There is no cache."""

    def move_pages(self, move: PageMove) -> None:
        """There is no cache."""


def _steps() -> float:
    """Returns the time of a batch from its submission to its end, over the number of steps."""
    blocks = _SEQUENCES * (_PROMPT_TOKENS + _NEW_TOKENS) // 8
    engine = Engine(EngineSettings(blocks, max_sequences=_SEQUENCES), _NoModel())
    sampling = SamplingParams(temperature=0.0, seed=0, ignore_eos=True)
    for group in range(_SEQUENCES):
        prompt_ids = [group * _PROMPT_TOKENS + i for i in range(_PROMPT_TOKENS)]
        engine.submit(SubmitGroup(group, prompt_ids, sampling, _NEW_TOKENS, [], [[]], [False]))
    began_s, steps = time.perf_counter(), 0
    while engine.has_work:
        engine.step()
        steps += 1
    return (time.perf_counter() - began_s) / steps


def _sample(kernels: NativeKernels | None, logits_SV: torch.Tensor, sampling: SamplingParams) -> float:
    rows = [SampleRow(sampling, 0, index, (), ()) for index in range(len(logits_SV))]
    with torch.inference_mode():
        return _timed(partial(sample, logits_SV, rows, kernels))


def _detokenize(text: TextModel, token_ids: Sequence[int]) -> float:
    detokenizer = text.detokenizer()
    began_s = time.perf_counter()
    for token_id in token_ids:
        detokenizer.push(token_id)
    detokenizer.flush()
    return time.perf_counter() - began_s
