"""transformers `generate` in float32, with the model as its own classes load it."""

from __future__ import annotations

import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, StoppingCriteria, StoppingCriteriaList

from .protocol import RunnerAnswer, Settings, finished, serve


class FirstToken(StoppingCriteria):
    """A criterion that stops nothing.

    `generate` calls it after every token, so it sees the first ones.
    """

    def __init__(self) -> None:
        self.at_s = 0.0

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.at_s = self.at_s or time.perf_counter()
        return torch.zeros(len(input_ids), dtype=torch.bool)


class Transformers:
    def __init__(self, settings: Settings) -> None:
        torch.set_num_threads(settings.threads)
        self.facts = {"precision": "float32"}
        model_class: Any = AutoModelForCausalLM
        config_class: Any = GenerationConfig
        self._model = model_class.from_pretrained(settings.model, dtype=torch.float32).eval()
        self._model.generation_config = config_class(do_sample=False, eos_token_id=None, pad_token_id=0)

    @torch.inference_mode()
    def generate(self, prompts: list[list[int]], new_tokens: int) -> RunnerAnswer:
        ids, first = torch.tensor(prompts), FirstToken()
        began_s = time.perf_counter()
        output = self._model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens,
            stopping_criteria=StoppingCriteriaList([first]),
        )
        total_s = time.perf_counter() - began_s
        answers = output[:, ids.shape[1] :].tolist()
        return finished(answers, new_tokens, first.at_s - began_s, total_s, len(prompts))


if __name__ == "__main__":
    serve(Transformers, ["transformers", "torch"])
