"""vLLM's `/v1/completions` (`vllm serve`), as read in vLLM 0.33 and run with 0.32 on a CPU.

`return_token_ids` (since 0.10.2) gives the ids of each event, the stop token's among them. `ignore_eos` is always set: the
stop tokens are listed, so that the server says which one ended the answer. It bans them until `min_tokens` itself.

Its bias is added before penalties and min-p is applied before top-p, ours after; both differ only where two of them are set.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from uuid import uuid4

import msgspec

from ryzanstein.worker.engines.remote.asked import AskedChoice, ComputedPart, ComputedToken
from ryzanstein.worker.engines.remote.dialects.completions import CountedTokens, completion
from ryzanstein.worker.engines.remote.dialects.dialect import NEVER, ServedEngine, decoded, same_length
from ryzanstein.worker.engines.remote.http.faults import EngineProtocolError, reported_in_stream

_NEUTRAL: Mapping[str, object] = MappingProxyType(
    {
        "temperature": 0.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "seed": None,
        "logit_bias": None,
        "allowed_token_ids": None,
        "min_tokens": 0,
    }
)
"""With our sampler vLLM takes the one token that it leaves."""
_ID = "token_id:"


class _Logprobs(msgspec.Struct):
    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] = []


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class _VllmEvent(msgspec.Struct):
    choices: list[_Choice] = []
    usage: CountedTokens | None = None
    error: object = None


class VllmDialect:
    """The dialect of vLLM."""

    name = "vllm"
    unsupported = NEVER - {"prompt_logprobs"}
    loses_ids = False

    def body(self, asked: AskedChoice, served: ServedEngine) -> tuple[str, dict[str, object]]:
        sampling = asked.sampling
        named = {"request_id": f"{asked.request_id}-{uuid4().hex[:8]}"} if asked.request_id else {}
        return "/v1/completions", {
            **named,
            **completion(asked, served),
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "ignore_eos": True,
            "allowed_token_ids": list(sampling.allowed_token_ids) or None,
            "logprobs": sampling.logprobs,
            "prompt_logprobs": None,
            "bad_words": [],
            "cache_salt": asked.salt or None,
            "priority": 0,
            **({} if asked.arguments is None else {**_NEUTRAL, "vllm_xargs": dict(asked.arguments)}),
        }

    def part(self, event: bytes, seen: int = 0) -> ComputedPart | None:
        if event == b"[DONE]":
            return None
        found = decoded(event, _VllmEvent)
        if found.error is not None:
            raise reported_in_stream(found.error)
        usage = found.usage or CountedTokens()
        if not found.choices:
            return ComputedPart(cached_tokens=usage.cached_tokens)
        choice = found.choices[0]
        if choice.token_ids is None:
            raise EngineProtocolError("an event has no token ids: the server does not know return_token_ids")
        if choice.finish_reason in ("abort", "error"):
            raise reported_in_stream(f"the answer was ended with {choice.finish_reason!r}")
        return ComputedPart(
            _tokens(choice.token_ids, choice.logprobs),
            finish=choice.finish_reason or "",
            cached_tokens=usage.cached_tokens,
            stop_token=choice.stop_reason if isinstance(choice.stop_reason, int) else None,
            num_prompt=usage.prompt_tokens,
            num_generated=usage.completion_tokens,
        )


def scoring(asked: AskedChoice, served: ServedEngine, num_top: int) -> tuple[str, dict[str, object]]:
    """Returns the path and the JSON of a request for the scores of a prompt. vLLM gives them in no stream."""
    path, body = VllmDialect().body(asked, served)
    return path, {**body, "stream": False, "stream_options": None, "prompt_logprobs": num_top}


class _Score(msgspec.Struct):
    logprob: float = 0.0


class _Scored(msgspec.Struct):
    prompt_logprobs: list[dict[int, _Score] | None] | None = None


class _ScoredAnswer(msgspec.Struct):
    choices: list[_Scored] = []


def scores(answer: object, prompt_ids: Sequence[int], num_top: int) -> list[ComputedToken]:
    """Returns how likely each token of the prompt is, from the second on. Raises EngineProtocolError."""
    try:
        choices = msgspec.convert(answer, _ScoredAnswer, strict=False).choices
    except msgspec.ValidationError as error:
        raise EngineProtocolError(f"the scores of a prompt are not as they must be: {error}") from None
    rows = choices[0].prompt_logprobs if choices else None
    if rows is None or len(rows) != len(prompt_ids):
        raise EngineProtocolError(f"the engine scored {0 if rows is None else len(rows)} of {len(prompt_ids)} prompt tokens")
    return [_score(row or {}, token_id, num_top) for row, token_id in zip(rows[1:], prompt_ids[1:], strict=True)]


def _score(row: Mapping[int, _Score], token_id: int, num_top: int) -> ComputedToken:
    if token_id not in row:
        raise EngineProtocolError(f"the engine did not score the prompt's token {token_id}")
    likeliest = sorted(((each, score.logprob) for each, score in row.items()), key=lambda each: -each[1])
    return ComputedToken(token_id, row[token_id].logprob, likeliest[:num_top])


def _tokens(token_ids: Sequence[int], logprobs: _Logprobs | None) -> list[ComputedToken]:
    if logprobs is None:
        return [ComputedToken(token_id) for token_id in token_ids]
    same_length(token_ids, logprobs.token_logprobs, logprobs.top_logprobs)
    columns = zip(token_ids, logprobs.token_logprobs, logprobs.top_logprobs, strict=True)
    return [ComputedToken(token_id, logprob, _top(top or {})) for token_id, logprob, top in columns]


def _top(top: Mapping[str, float]) -> list[tuple[int, float]]:
    """Returns the alternatives, likeliest first. The sampled token is among them, also where it is none of the likeliest."""
    try:
        found = [(int(name.removeprefix(_ID)), logprob) for name, logprob in top.items()]
    except ValueError:
        raise EngineProtocolError(
            "alternatives have no token ids: the server does not know return_tokens_as_token_ids"
        ) from None
    return sorted(found, key=lambda each: -each[1])
