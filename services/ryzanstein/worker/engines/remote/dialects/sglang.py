"""SGLang's `/generate`, as read in SGLang 0.5.23. It never ran against one.

An event has the whole answer so far unless the server runs with `--incremental-streaming-output`; `completion_tokens` tells
both apart. `ignore_eos` switches off `stop_token_ids` too, and our reader ends the answer at them (see `computing`).

Log probabilities are those after the temperature, and the repetition penalty counts only the answer: neither is ours.
"""

from __future__ import annotations

import msgspec

from ryzanstein.worker.engines.remote.asked import AskedChoice, ComputedPart, ComputedToken
from ryzanstein.worker.engines.remote.dialects.completions import LARGEST_SEED
from ryzanstein.worker.engines.remote.dialects.dialect import NEVER, ServedEngine, biases, decoded
from ryzanstein.worker.engines.remote.http.faults import EngineProtocolError, reported_in_stream

_ALL = -1
"""`top_k` that keeps all tokens."""


class _Finish(msgspec.Struct):
    type: str
    matched: int | str | None = None
    message: str = ""
    status_code: int | None = None


class _Meta(msgspec.Struct):
    completion_tokens: int
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    finish_reason: _Finish | None = None


class _SglangEvent(msgspec.Struct):
    meta_info: _Meta | None = None
    output_ids: list[int] | None = None
    error: object = None


class SglangDialect:
    """The dialect of SGLang."""

    name = "sglang"
    unsupported = NEVER | {"allowed_token_ids", "logprobs", "repetition_penalty"}
    loses_ids = False

    def body(self, asked: AskedChoice, served: ServedEngine) -> tuple[str, dict[str, object]]:
        sampling = asked.sampling
        return "/generate", {
            "input_ids": list(asked.token_ids),
            "stream": True,
            "return_logprob": False,
            "return_hidden_states": False,
            # Older servers know only `extra_key`.
            "cache_salt": asked.salt or None,
            "extra_key": asked.salt or None,
            "sampling_params": {
                "n": 1,
                "max_new_tokens": asked.max_tokens,
                "min_new_tokens": asked.min_tokens,
                "stop": [],
                "stop_regex": None,
                "stop_token_ids": list(asked.stop_token_ids),
                "ignore_eos": sampling.ignore_eos,
                "no_stop_trim": True,
                "skip_special_tokens": False,
                "spaces_between_special_tokens": False,
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k or _ALL,
                "min_p": sampling.min_p,
                "repetition_penalty": sampling.repetition_penalty,
                "presence_penalty": sampling.presence_penalty,
                "frequency_penalty": sampling.frequency_penalty,
                "sampling_seed": asked.seed & LARGEST_SEED,
                "logit_bias": {str(token): bias for token, bias in biases(asked, served).items()} or None,
                "json_schema": None,
                "regex": None,
                "ebnf": None,
                "structural_tag": None,
            },
        }

    def part(self, event: bytes, seen: int = 0) -> ComputedPart | None:
        if event == b"[DONE]":
            return None
        found = decoded(event, _SglangEvent)
        if found.error is not None:
            raise reported_in_stream(found.error)
        if found.meta_info is None or found.output_ids is None:
            raise EngineProtocolError("an event has no output_ids: the server is too old")
        meta = found.meta_info
        finish = meta.finish_reason
        if finish is not None and finish.type == "abort":
            raise reported_in_stream({"message": finish.message, "code": finish.status_code})
        new = max(meta.completion_tokens - seen, 0)
        ids = found.output_ids[-new:] if new else []
        return ComputedPart(
            [ComputedToken(token_id) for token_id in ids],
            finish="" if finish is None else finish.type,
            cached_tokens=meta.cached_tokens,
            stop_token=finish.matched if finish is not None and isinstance(finish.matched, int) else None,
            num_prompt=meta.prompt_tokens,
            num_generated=meta.completion_tokens,
        )
