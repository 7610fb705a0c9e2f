"""Converts the options of a body to `SamplingParams`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from ryzanstein import errors
from ryzanstein.generation.request import NAMES, SamplingParams
from ryzanstein.router.faces.openai.requests.response_format import constraint_of, naming_the_constraint
from ryzanstein.router.faces.openai.requests.schemas import GenerationOptions, Whole

_UINT32 = 2**32 - 1


def sampling_params(body: GenerationOptions, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
    """Returns validated parameters, with OpenAI's defaults: temperature 1, one choice.

    What the body leaves out is noted: the model may have its own default for it. A negative seed,
    which OpenAI allows, is taken as its 64 bits.
    """
    given = {
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": None if body.top_k == -1 else whole("top_k", body.top_k),
        "min_p": body.min_p,
        "repetition_penalty": body.repetition_penalty,
        "presence_penalty": body.presence_penalty,
        "frequency_penalty": body.frequency_penalty,
        "min_tokens": whole("min_tokens", body.min_tokens),
        "n": whole("n", body.n),
        "ignore_eos": body.ignore_eos,
        "skip_special_tokens": body.skip_special_tokens,
        "include_stop_str_in_output": body.include_stop_str_in_output,
        "prompt_logprobs": whole("prompt_logprobs", body.prompt_logprobs),
        "truncate_prompt_tokens": whole("truncate_prompt_tokens", body.truncate_prompt_tokens),
        "keep_prompt_head": whole("keep_prompt_head", body.keep_prompt_head),
    }
    with naming_the_constraint(body):
        params = SamplingParams(
            **{name: value for name, value in given.items() if value is not None},  # type: ignore[arg-type]
            seed=None if body.seed is None else _seed(whole("seed", body.seed) or 0),
            max_tokens=max_tokens,
            stop=_stop(body.stop),
            stop_token_ids=token_ids_of("stop_token_ids", body.stop_token_ids or ()),
            logit_bias=_logit_bias(body.logit_bias or {}),
            logprobs=logprobs,
            constraint=constraint_of(body),
            bad_words=tuple(body.bad_words or ()),
            allowed_token_ids=token_ids_of("allowed_token_ids", body.allowed_token_ids or ()),
            unset=frozenset(name for name in NAMES if getattr(body, name) is None),
        )
        params.validate()
    return params


def whole(field: str, value: Whole | None) -> int | None:
    """Returns the integer. Raises INVALID_ARGUMENT for a fraction."""
    if isinstance(value, float):
        if not value.is_integer():
            raise errors.invalid(field, "must be an integer", value)
        return int(value)
    return value


def token_ids_of(field: str, given: Sequence[Whole]) -> tuple[int, ...]:
    """Returns token ids, also those that are written as 5.0. Raises INVALID_ARGUMENT for a fraction."""
    if float not in set(map(type, given)):
        return tuple(cast("Sequence[int]", given))
    return tuple(whole(f"{field}[{place}]", each) or 0 for place, each in enumerate(given))


def _seed(seed: int) -> int:
    if not -(2**63) <= seed < 2**64:
        raise errors.invalid("seed", f"must be in [{-(2**63)}, {2**64 - 1}]", seed)
    return seed % 2**64


def _stop(stop: str | list[str] | None) -> tuple[str, ...]:
    if stop is None:
        return ()
    return (stop,) if isinstance(stop, str) else tuple(stop)


def _logit_bias(biases: dict[str, float]) -> tuple[tuple[int, float], ...]:
    return tuple(sorted((_token_id(key), bias) for key, bias in biases.items()))


def _token_id(key: str) -> int:
    """Returns the token id of a key. JSON has no integer keys."""
    if not (key.isascii() and key.isdigit() and len(key) <= 10 and int(key) <= _UINT32):
        raise errors.invalid("logit_bias", f"each key must be a token id in [0, {_UINT32}]", key[:32])
    return int(key)
