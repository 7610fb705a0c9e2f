"""OpenVINO GenAI's continuous batching.

Without quantization, float32 is pinned; with int8 weights it computes in its preferred precision
for the CPU.
"""

from __future__ import annotations

import itertools
import time
from typing import Any

import numpy as np
import openvino
import openvino_genai

from .protocol import RunnerAnswer, Settings, finished, serve

_GIB = 2**30


class OpenVino:
    def __init__(self, settings: Settings) -> None:
        properties: dict[str, Any] = {"INFERENCE_NUM_THREADS": settings.threads}
        if settings.quantization == "none":
            properties["INFERENCE_PRECISION_HINT"] = "f32"
        self._pipeline: Any = openvino_genai.ContinuousBatchingPipeline(
            settings.model, _scheduling(settings), "CPU", properties
        )
        self._numbers = itertools.count()
        self.facts = {"precision": properties.get("INFERENCE_PRECISION_HINT", "chosen by OpenVINO")}

    def generate(self, prompts: list[list[int]], new_tokens: int) -> RunnerAnswer:
        config = openvino_genai.GenerationConfig(max_new_tokens=new_tokens, ignore_eos=True, do_sample=False)
        inputs = [openvino.Tensor(np.array([prompt], dtype=np.int64)) for prompt in prompts]
        began_s = time.perf_counter()
        handles = [self._pipeline.add_request(next(self._numbers), ids, config) for ids in inputs]
        while not all(handle.can_read() for handle in handles):
            self._pipeline.step()
        ttft_s = time.perf_counter() - began_s
        early = [_read(handle) for handle in handles]
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
        total_s = time.perf_counter() - began_s
        answers = [first + _read(handle) for first, handle in zip(early, handles, strict=True)]
        return finished(answers, new_tokens, ttft_s, total_s, sum(map(len, early)))


def _scheduling(settings: Settings) -> Any:
    scheduling = openvino_genai.SchedulerConfig()
    scheduling.cache_size = -(-settings.cache_bytes // _GIB)
    scheduling.max_num_batched_tokens = 4096
    scheduling.max_num_seqs = settings.max_batch
    scheduling.dynamic_split_fuse = True
    scheduling.enable_prefix_caching = False
    return scheduling


def _read(handle: Any) -> list[int]:
    """Returns what arrived since the last read."""
    token_ids: list[int] = []
    while handle.can_read():
        for output in handle.read().values():
            token_ids += output.generated_ids
    return token_ids


if __name__ == "__main__":
    serve(OpenVino, ["openvino-genai", "openvino"])
