"""CTranslate2's Generator, int8.

It takes tokens as text. It does not report when a batch has its first tokens, so a run for them
alone comes first.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import ctranslate2

from .protocol import RunnerAnswer, Settings, finished, serve


class CTranslate2:
    def __init__(self, settings: Settings) -> None:
        self.facts = {"precision": settings.quantization}
        self._vocabulary = json.loads((Path(settings.model) / "vocabulary.json").read_text())
        self._generator: Any = ctranslate2.Generator(
            settings.model,
            device="cpu",
            compute_type=settings.quantization,
            intra_threads=settings.threads,
            inter_threads=1,
        )

    def generate(self, prompts: list[list[int]], new_tokens: int) -> RunnerAnswer:
        texts = [[self._vocabulary[token_id] for token_id in prompt] for prompt in prompts]
        _, ttft_s = self._timed(texts, 1)
        answers, total_s = self._timed(texts, new_tokens)
        return finished(answers, new_tokens, ttft_s, total_s, len(prompts))

    def _timed(self, texts: list[list[str]], new_tokens: int) -> tuple[list[list[int]], float]:
        began_s = time.perf_counter()
        results = self._generator.generate_batch(
            texts,
            max_length=new_tokens,
            min_length=new_tokens,
            sampling_topk=1,
            beam_size=1,
            include_prompt_in_result=False,
            end_token=[],
            max_batch_size=0,
        )
        return [result.sequences_ids[0] for result in results], time.perf_counter() - began_s


if __name__ == "__main__":
    serve(CTranslate2, ["ctranslate2"])
