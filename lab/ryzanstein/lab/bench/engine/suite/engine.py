"""The suite's engine part: batches through real ranks under the same group as a node's.

The ranks are started in every round.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from ryzanstein.files.model_paths import is_gguf
from ryzanstein.lab.bench.engine.engine import Workload, rank_spec
from ryzanstein.lab.bench.engine.flight import Engines
from ryzanstein.lab.bench.engine.reference_ceilings import cache_bytes
from ryzanstein.lab.bench.engine.suite.rounds import RoundLog, Subject, repeated
from ryzanstein.worker.settings.quantization import Quantization
from ryzanstein.worker.text.model_files import ModelFiles

_TOKENS_PER_STEP = 512
_WARM_UP_TOKENS = 4
_USUAL_CACHE_BYTES = 64 * 2**20  # used if the system does not report the cache size


class EnginePart:
    """One model and number of ranks, on CPUs.

    It times the start, the first tokens and a decoded token at each batch size.
    """

    def __init__(self, name: str, model: Path, tp: int, workload: Workload, quantization: Quantization = "none") -> None:
        """`name` stands for the model in figures.

        Raises what reading the model raises, and INVALID_ARGUMENT if the workload does not fit its
        context.
        """
        files = ModelFiles.read(model)
        workload.check(files.context_length)
        self._vocab_size = files.vocab_size
        self._workload = workload
        spec = rank_spec(model, workload, tp, 0, _TOKENS_PER_STEP)
        self._spec = replace(spec, device="cpu", settings=dataclasses.replace(spec.settings, quantization=quantization))
        self._name = f"engine/{name}/tp{tp}"
        self._decode_reference = decode_reference(model)

    async def round(self, log: RoundLog) -> None:
        prompt_tokens = self._workload.prompt_tokens
        async with AsyncExitStack() as stack:
            engines = Engines(self._spec, self._vocab_size)
            await log.time([self._start_subject()], partial(_start, stack, engines))
            await engines.run(max(self._workload.batches), prompt_tokens, _WARM_UP_TOKENS)
            for batch in self._workload.batches:
                await log.time(self._batch_subjects(batch), partial(self._run, engines, batch))

    def _start_subject(self) -> Subject:
        return Subject(f"{self._name}/start", "processes spawned until ready", "loop")

    def _batch_subjects(self, batch: int) -> tuple[Subject, Subject]:
        size = f"{batch} x ({self._workload.prompt_tokens} + {self._workload.new_tokens} tokens)"
        return (
            Subject(f"{self._name}/batch{batch}/first-tokens", f"all first tokens of {size}", "matmul"),
            Subject(f"{self._name}/batch{batch}/decode", f"one decoded token of {size}", self._decode_reference),
        )

    async def _run(self, engines: Engines, batch: int) -> Sequence[float]:
        async def run() -> dict[str, float]:
            done = await engines.run(batch, self._workload.prompt_tokens, self._workload.new_tokens)
            return {"first_tokens": done.ttft_s, "decode": 1 / done.decode_tokens_per_s}

        medians = await repeated(run)
        return medians["first_tokens"], medians["decode"]


def decode_reference(model: Path) -> str:
    """Returns the reference kernel for decode steps, which read all weights.

    Weights that no cache holds come from memory. Otherwise operators and the joining of threads
    dominate.
    """
    files = [model] if is_gguf(model) else model.glob("*.safetensors")
    weight_bytes = sum(path.stat().st_size for path in files)
    return "read" if weight_bytes > (cache_bytes() or _USUAL_CACHE_BYTES) else "small"


async def _start(stack: AsyncExitStack, engines: Engines) -> Sequence[float]:
    began_s = time.perf_counter()
    await stack.enter_async_context(engines)
    return (time.perf_counter() - began_s,)
