"""What vLLM's and TensorRT-LLM's `/v1/completions` have in common: both follow OpenAI's, with the same additions."""

from __future__ import annotations

import msgspec

from ryzanstein.worker.engines.remote.asked import AskedChoice
from ryzanstein.worker.engines.remote.dialects.dialect import ServedEngine, biases

LARGEST_SEED = 2**63 - 1


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class CountedTokens(msgspec.Struct):
    """How many tokens the server counts, of prompt and answer."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _PromptDetails | None = None

    @property
    def cached_tokens(self) -> int | None:
        return None if self.prompt_tokens_details is None else self.prompt_tokens_details.cached_tokens


def completion(asked: AskedChoice, served: ServedEngine) -> dict[str, object]:
    """Returns the fields that mean the same to both servers."""
    sampling = asked.sampling
    return {
        "model": served.model,
        "prompt": list(asked.token_ids),
        "add_special_tokens": False,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "n": 1,
        "echo": False,
        "max_tokens": asked.max_tokens,
        "min_tokens": asked.min_tokens,
        "stop": [],
        "stop_token_ids": list(asked.stop_token_ids),
        # Without it the stop token is cut off.
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "seed": asked.seed & LARGEST_SEED,
        "logit_bias": {str(token): bias for token, bias in biases(asked, served).items()} or None,
        "truncate_prompt_tokens": None,
    }
