"""llama.cpp's `/completion` (`llama-server`), as read and run in the builds of October 2026.

Traps of it: top_k 40, min_p 0.05 and a penalty window of 64 are defaults, and the server's own flags count for what is not
sent. A token in the middle of a character has no event, and its id is never sent (see `gaps`). An event of progress has the
token 0, which nobody generated. The token that ends an answer has an event of its own, then comes the event with `stop`.
Only the model's own end tokens end an answer; our reader ends it at the others (see `computing`).

The samplers stand in the order in which ours apply: penalties, temperature, top-k, top-p, min-p. With a window of all tokens
the repetition penalty is ours; presence and frequency count the prompt, so these are not. A biased token that was seen before
is penalized after its bias here, and before it by our engine.
"""

from __future__ import annotations

import msgspec

from ryzanstein.worker.engines.remote.asked import AskedChoice, ComputedPart, ComputedToken
from ryzanstein.worker.engines.remote.dialects.dialect import NEVER, NO_CACHE_SCOPES, ServedEngine, biases, decoded
from ryzanstein.worker.engines.remote.http.faults import reported_in_stream

_LACKS = {"presence_penalty", "frequency_penalty", "allowed_token_ids", "min_tokens", "ignore_eos", NO_CACHE_SCOPES}
_NUM_SEEDS = 2**32 - 1
"""The seed 2^32 - 1 asks for a random one."""
_STRIDE = 0x9E3779B9
"""Odd, so that the seeds of one answer's tokens all differ (Weyl sequence)."""
_FINISHES = {"eos": "stop", "word": "stop", "limit": "length"}


class _Alternative(msgspec.Struct):
    id: int
    logprob: float


class _Scored(msgspec.Struct):
    logprob: float
    top_logprobs: list[_Alternative] = []


class _Progress(msgspec.Struct):
    processed: int
    cache: int = 0


class _Timings(msgspec.Struct):
    cache_n: int | None = None


class _LlamaEvent(msgspec.Struct):
    content: str = ""
    tokens: list[int] = []
    stop: bool = False
    stop_type: str = ""
    tokens_predicted: int = 0
    tokens_evaluated: int | None = None
    prompt_progress: _Progress | None = None
    completion_probabilities: list[_Scored] = []
    timings: _Timings | None = None
    error: object = None


class LlamaCppDialect:
    """The dialect of llama.cpp."""

    name = "llama.cpp"
    unsupported = NEVER | _LACKS
    loses_ids = True

    def body(self, asked: AskedChoice, served: ServedEngine) -> tuple[str, dict[str, object]]:
        sampling = asked.sampling
        return "/completion", {
            "prompt": list(asked.token_ids),
            "stream": True,
            "return_tokens": True,
            "return_progress": True,
            # With a salt, nothing of others is reused. What is left behind may be reused by others: see `unsupported`.
            "cache_prompt": not asked.salt,
            "n_cache_reuse": 0,
            "n_predict": asked.max_tokens,
            "n_probs": 0 if sampling.logprobs is None else max(sampling.logprobs, 1),
            "post_sampling_probs": False,
            "stop": [],
            "ignore_eos": sampling.ignore_eos,
            "samplers": ["penalties", "temperature", "top_k", "top_p", "min_p"],
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
            "min_keep": 0,
            "repeat_penalty": sampling.repetition_penalty,
            # Some builds refuse the -1 that asks for the whole context.
            "repeat_last_n": len(asked.token_ids) + asked.max_tokens,
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty,
            "seed": _seed(asked),
            "logit_bias": [[token, bias] for token, bias in biases(asked, served).items()],
            "dynatemp_range": 0.0,
            "dynatemp_exponent": 1.0,
            "typical_p": 1.0,
            "top_n_sigma": -1.0,
            "xtc_probability": 0.0,
            "dry_multiplier": 0.0,
            "mirostat": 0,
            "grammar": "",
            "n_keep": 0,
            "n_indent": 0,
            "t_max_predict_ms": -1,
            "timings_per_token": False,
            "response_fields": [],
        }

    def part(self, event: bytes, seen: int = 0) -> ComputedPart | None:
        if event == b"[DONE]":
            return None
        found = decoded(event, _LlamaEvent)
        if found.error is not None:
            raise reported_in_stream(found.error)
        progress, timings = found.prompt_progress, found.timings or _Timings()
        return ComputedPart(
            [] if progress or not found.tokens_predicted else _tokens(found),
            finish=(_FINISHES.get(found.stop_type) or found.stop_type or "stop") if found.stop else "",
            cached_tokens=progress.cache if progress else timings.cache_n,
            prompt_computed=progress.processed if progress else None,
            num_prompt=found.tokens_evaluated,
            num_generated=found.tokens_predicted,
            text=found.content,
        )


def _tokens(found: _LlamaEvent) -> list[ComputedToken]:
    scored = found.completion_probabilities
    if len(scored) != len(found.tokens):
        return [ComputedToken(token_id) for token_id in found.tokens]
    pairs = zip(found.tokens, scored, strict=True)
    return [
        ComputedToken(token_id, each.logprob, [(other.id, other.logprob) for other in each.top_logprobs])
        for token_id, each in pairs
    ]


def _seed(asked: AskedChoice) -> int:
    """Returns the seed. Its random numbers begin anew with each request, and must not repeat those of tokens before."""
    return (asked.seed + asked.num_generated * _STRIDE) % _NUM_SEEDS
