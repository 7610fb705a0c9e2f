"""TensorRT-LLM's `/v1/completions` (`trtllm-serve`), as read in TensorRT-LLM 1.2 and its main branch. It never ran against one.

Events have token ids only with `detokenize: false`. Log probabilities are named by the text of tokens, so they are unusable.
Which penalties work depends on the server's backend, and it does not say so. Unknown fields are refused: what is sent is what
the server knows.
"""

from __future__ import annotations

import msgspec

from ryzanstein.worker.engines.remote.asked import AskedChoice, ComputedPart, ComputedToken
from ryzanstein.worker.engines.remote.dialects.completions import CountedTokens, completion
from ryzanstein.worker.engines.remote.dialects.dialect import NEVER, NO_CACHE_SCOPES, ServedEngine, decoded
from ryzanstein.worker.engines.remote.http.faults import EngineProtocolError, reported_in_stream

_PENALTIES = {"presence_penalty", "frequency_penalty", "repetition_penalty"}


class _TrtllmChoice(msgspec.Struct):
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class _TrtllmEvent(msgspec.Struct):
    choices: list[_TrtllmChoice] = []
    usage: CountedTokens | None = None
    error: object = None


class TrtllmDialect:
    """The dialect of TensorRT-LLM."""

    name = "tensorrt-llm"
    unsupported = NEVER | _PENALTIES | {"allowed_token_ids", "logprobs", NO_CACHE_SCOPES}
    loses_ids = False

    def body(self, asked: AskedChoice, served: ServedEngine) -> tuple[str, dict[str, object]]:
        return "/v1/completions", {
            **completion(asked, served),
            "detokenize": False,
            "ignore_eos": asked.sampling.ignore_eos,
            "prompt_ignore_length": asked.num_prompt,
            "logprobs": None,
        }

    def part(self, event: bytes, seen: int = 0) -> ComputedPart | None:
        if event == b"[DONE]":
            return None
        found = decoded(event, _TrtllmEvent)
        if found.error is not None:
            raise reported_in_stream(found.error)
        usage = found.usage or CountedTokens()
        if not found.choices:
            return ComputedPart(cached_tokens=usage.cached_tokens)
        choice = found.choices[0]
        if choice.token_ids is None:
            raise EngineProtocolError("an event has no token ids: the server does not obey detokenize=false")
        if choice.finish_reason in ("cancelled", "timeout"):
            raise reported_in_stream(f"the answer was ended with {choice.finish_reason!r}")
        return ComputedPart(
            [ComputedToken(token_id) for token_id in choice.token_ids],
            finish=choice.finish_reason or "",
            cached_tokens=usage.cached_tokens,
            stop_token=choice.stop_reason if isinstance(choice.stop_reason, int) else None,
            num_prompt=usage.prompt_tokens,
            num_generated=usage.completion_tokens,
        )
