"""What each kind of server is asked, and what is read from its events."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
from tests.worker.engines.recorded import (
    DIALECTS,
    DONE,
    INCREMENTAL,
    STREAMS,
    TOKENS,
    asked,
    llama_event,
    packed,
    served,
    sglang_event,
    vllm_event,
)

from ryzanstein.constraints import Constraint
from ryzanstein.generation.request import SamplingParams
from ryzanstein.worker.engines.remote.asked import ComputedPart, ComputedToken
from ryzanstein.worker.engines.remote.dialects.vllm import scores
from ryzanstein.worker.engines.remote.http.faults import EngineBusy, EngineProtocolError, EngineRefused, EngineUnreachable

# What the agent or the front does itself, or hands over as a field of AskedChoice.
OURS = {"seed", "max_tokens", "stop", "stop_token_ids", "n", "skip_special_tokens", "include_stop_str_in_output"}
OURS |= {"truncate_prompt_tokens", "keep_prompt_head", "unset"}
OTHER_VALUES: dict[str, Any] = {
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "repetition_penalty": 1.2,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "min_tokens": 3,
    "logit_bias": ((5, 1.5),),
    "logprobs": 2,
    "ignore_eos": True,
    "constraint": Constraint("regex", "a+"),
    "bad_words": ("x",),
    "allowed_token_ids": (5, 6),
    "prompt_logprobs": 1,
}


def body(name: str, **more: Any) -> dict[str, Any]:
    return DIALECTS[name].body(asked(**more), served(name))[1]


_ELSEWHERE = {("vllm", "ignore_eos"), ("vllm", "prompt_logprobs")}
"""By the listed stop tokens; by a request of its own, see `scoring`."""


@pytest.mark.parametrize("name", DIALECTS)
def test_every_parameter_reaches_the_server_or_is_named_as_unsupported(name: str) -> None:
    """Of vLLM `ignore_eos` is not seen: the stop tokens that it is sent are without the model's own then."""
    assert {each.name for each in fields(SamplingParams)} == OURS | set(OTHER_VALUES)
    for parameter, value in OTHER_VALUES.items():
        changed = body(name, **{parameter: value}) != body(name)
        assert changed or parameter in DIALECTS[name].unsupported or (name, parameter) in _ELSEWHERE, parameter


@pytest.mark.parametrize("name", DIALECTS)
def test_the_same_fields_are_sent_whatever_is_asked(name: str) -> None:
    other = {key: value for key, value in OTHER_VALUES.items() if key != "constraint"}
    changed = body(name, **other, salt="tenant")
    assert _names(changed) == _names(body(name))


def _names(found: dict[str, Any]) -> set[str]:
    return set(found) | set(found.get("sampling_params", ()))


def test_the_fields_that_fill_themselves_from_the_models_configuration_are_all_sent() -> None:
    """vLLM: `_DEFAULT_SAMPLING_PARAMS`; SGLang: `preferred_sampling_params`."""
    sent = {"temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"}
    for found in (body("vllm"), body("sglang")["sampling_params"], body("tensorrt-llm")):
        assert sent <= {name for name, value in found.items() if value is not None}


def test_a_greedy_answer_is_asked_of_llama_cpp_with_every_default_switched_off() -> None:
    path, found = DIALECTS["llama.cpp"].body(asked(), served("llama.cpp"))
    assert path == "/completion"
    neutral = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "repeat_penalty": 1.0, "repeat_last_n": 11, "temperature": 0.0}
    neutral |= {"presence_penalty": 0.0, "frequency_penalty": 0.0, "typical_p": 1.0, "top_n_sigma": -1.0, "mirostat": 0}
    neutral |= {"xtc_probability": 0.0, "dry_multiplier": 0.0, "dynatemp_range": 0.0, "grammar": "", "stop": [], "n_keep": 0}
    neutral |= {"samplers": ["penalties", "temperature", "top_k", "top_p", "min_p"], "n_cache_reuse": 0, "n_probs": 0}
    assert {name: found[name] for name in neutral} == neutral


@pytest.mark.parametrize("seed", [0, 7, 2**31, 2**32 - 1, 2**32, 2**63, 2**64 - 1])
@pytest.mark.parametrize("name", DIALECTS)
def test_every_seed_is_one_that_the_server_takes(name: str, seed: int) -> None:
    found = body(name, seed=seed)
    sent = found["sampling_params"]["sampling_seed"] if name == "sglang" else found["seed"]
    assert 0 <= sent < (2**32 - 1 if name == "llama.cpp" else 2**63)


def test_random_numbers_of_llama_cpp_do_not_repeat_after_a_continuation() -> None:
    seeds = [body("llama.cpp", token_ids=(1, 5, 9, *range(count)))["seed"] for count in range(1000)]
    assert len(set(seeds)) == 1000
    assert seeds[0] == body("llama.cpp")["seed"] == 7


def test_a_bias_is_summed_and_left_out_outside_of_the_vocabulary() -> None:
    bias = ((5, 1.5), (5, -0.5), (100, 3.0), (6, 2.0))
    assert body("vllm", logit_bias=bias)["logit_bias"] == {"5": 1.0, "6": 2.0}
    assert body("llama.cpp", logit_bias=bias)["logit_bias"] == [[5, 1.0], [6, 2.0]]


def test_a_salt_keeps_a_prefix_apart_where_the_server_can() -> None:
    assert body("vllm", salt="t")["cache_salt"] == body("sglang", salt="t")["cache_salt"] == "t"
    assert body("vllm")["cache_salt"] is body("sglang")["cache_salt"] is None
    assert (body("llama.cpp")["cache_prompt"], body("llama.cpp", salt="t")["cache_prompt"]) == (True, False)
    assert {name for name, each in DIALECTS.items() if "cache-scopes" in each.unsupported} == {"llama.cpp", "tensorrt-llm"}


def test_attempts_of_one_request_have_different_names_in_vllm() -> None:
    names = {body("vllm", request_id="r-1")["request_id"] for _ in range(3)}
    assert len(names) == 3
    assert all(name.startswith("r-1-") for name in names)
    assert "request_id" not in body("vllm")


def read(name: str, events: list[object]) -> list[ComputedPart]:
    """The parts, each read with the number of tokens that those before it had."""
    parts: list[ComputedPart] = []
    for event in events:
        part = DIALECTS[name].part(packed(event), sum(len(each.tokens) for each in parts))
        parts += [part] if part is not None else []
    return parts


@pytest.mark.parametrize(("name", "events"), [*STREAMS.items(), ("sglang", INCREMENTAL)])
def test_a_recorded_stream_has_its_tokens_once_and_its_end(name: str, events: list[object]) -> None:
    parts = read(name, events)
    assert [token.token_id for part in parts for token in part.tokens] == TOKENS
    assert [part.finish for part in parts if part.finish] == ["stop"]
    assert {part.num_prompt for part in parts if part.num_prompt is not None} == {3}
    assert [part.cached_tokens for part in parts if part.cached_tokens is not None][-1] == 2


def test_the_progress_of_a_prompt_is_no_token() -> None:
    parts = read("llama.cpp", STREAMS["llama.cpp"])
    assert [part.prompt_computed for part in parts[:3]] == [2, 3, None]
    assert [len(part.tokens) for part in parts[:3]] == [0, 0, 1]


@pytest.mark.parametrize("name", DIALECTS)
def test_the_last_line_of_a_stream_says_nothing(name: str) -> None:
    assert DIALECTS[name].part(DONE) is None


def test_log_probabilities_of_vllm_have_ids_likeliest_first() -> None:
    top = {"token_id:17": -2.5, "token_id:5": -0.5, "token_id:6": -1.0}
    logprobs = {"text_offset": [0], "token_logprobs": [-2.5], "tokens": ["token_id:17"], "top_logprobs": [top]}
    (part,) = read("vllm", [vllm_event([17], 1, logprobs=logprobs)])
    (token,) = part.tokens
    assert (token.token_id, token.logprob, list(token.top)) == (17, -2.5, [(5, -0.5), (6, -1.0), (17, -2.5)])


def test_log_probabilities_of_llama_cpp_have_ids_likeliest_first() -> None:
    top = [{"id": 5, "token": "a", "bytes": [97], "logprob": -0.5}, {"id": 17, "token": "b", "bytes": [98], "logprob": -2.5}]
    scored = [{"id": 17, "token": "b", "bytes": [98], "logprob": -2.5, "top_logprobs": top}]
    (part,) = read("llama.cpp", [llama_event([17], 1, completion_probabilities=scored)])
    (token,) = part.tokens
    assert (token.token_id, token.logprob, list(token.top)) == (17, -2.5, [(5, -0.5), (17, -2.5)])


GARBAGE: list[object] = [b"", b"{", b"[]", b"null", b"\xff", b'"x"', b"{" * 5000]
NO_IDS: dict[str, list[object]] = {
    "vllm": [vllm_event([17], 1, token_ids=None), vllm_event([17], 1, token_ids=["17"]), {"choices": 3}],
    "sglang": [{"text": "x"}, {"text": "x", "meta_info": {"completion_tokens": 1}}, sglang_event(["17"], 1)],  # type: ignore[list-item]
    "llama.cpp": [llama_event(["17"], 1), llama_event([17], 1.5), llama_event([17], 1, tokens=None)],  # type: ignore[list-item,arg-type]
    "tensorrt-llm": [{"choices": [{"index": 0, "text": "x"}]}, {"choices": [{"token_ids": [None]}]}],
}


@pytest.mark.parametrize(("name", "event"), [(name, event) for name in DIALECTS for event in [*GARBAGE, *NO_IDS[name]]])
def test_what_is_no_event_is_a_protocol_error(name: str, event: object) -> None:
    with pytest.raises(EngineProtocolError) as raised:
        DIALECTS[name].part(packed(event))
    assert len(str(raised.value)) < 1000


@pytest.mark.parametrize("name", DIALECTS)
@pytest.mark.parametrize(
    ("error", "kind"),
    [
        ({"message": "EngineCore died", "code": 500}, EngineUnreachable),
        ({"message": "too long", "code": 400, "type": "exceed_context_size_error"}, EngineRefused),
        ({"message": "full", "code": 503}, EngineBusy),
        ({"message": "no code"}, EngineUnreachable),
        ("only text", EngineUnreachable),
        ([1], EngineUnreachable),
    ],
)
def test_an_error_within_a_stream_says_what_follows(name: str, error: object, kind: type[Exception]) -> None:
    with pytest.raises(kind) as raised:
        DIALECTS[name].part(packed({"error": error}))
    assert type(raised.value) is kind


@pytest.mark.parametrize(
    ("name", "event"),
    [
        ("vllm", vllm_event([], 1, "abort")),
        ("sglang", sglang_event([17], 1, {"type": "abort", "message": "out of memory", "status_code": 500})),
        ("sglang", sglang_event([17], 1, {"type": "abort", "message": "Abort in waiting queue"})),
        ("tensorrt-llm", {"choices": [{"token_ids": [], "finish_reason": "cancelled"}]}),
    ],
)
def test_an_answer_that_the_server_gives_up_is_not_finished(name: str, event: object) -> None:
    with pytest.raises(EngineUnreachable):
        DIALECTS[name].part(packed(event))


def test_the_words_of_llama_cpp_for_an_end_are_ours() -> None:
    ends: Callable[[str], str] = lambda kind: read("llama.cpp", [llama_event([], 3, stop=True, stop_type=kind)])[0].finish  # noqa: E731
    assert [ends(kind) for kind in ("eos", "word", "limit", "")] == ["stop", "stop", "length", "stop"]


def test_scores_of_a_prompt_are_read_for_each_token_from_the_second_on() -> None:
    row = {"2": {"logprob": -3.5, "rank": 9, "decoded_token": "x"}, "7": {"logprob": -0.5}, "8": {"logprob": -1.5}}
    answer = {"choices": [{"text": "", "prompt_logprobs": [None, row, {"3": {"logprob": -0.25}}]}]}
    assert scores(answer, [1, 2, 3], 2) == [
        ComputedToken(2, -3.5, [(7, -0.5), (8, -1.5)]),
        ComputedToken(3, -0.25, [(3, -0.25)]),
    ]
    assert scores(answer, [1, 2, 3], 0)[0].top == []


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"choices": []},
        {"choices": [{"prompt_logprobs": None}]},
        {"choices": [{"prompt_logprobs": [None, {"2": {"logprob": 0.0}}]}]},
        {"choices": [{"prompt_logprobs": [None, {"2": {"logprob": 0.0}}, {"4": {"logprob": 0.0}}]}]},
        {"choices": [{"prompt_logprobs": [None, {"2": {"logprob": 0.0}}, None]}]},
        {"choices": [{"prompt_logprobs": [None, {"two": {"logprob": 0.0}}, {"3": {"logprob": 0.0}}]}]},
        {"choices": [{"prompt_logprobs": [None, {"2": {"logprob": "x"}}, {"3": {"logprob": 0.0}}]}]},
    ],
)
def test_scores_that_are_none_of_this_prompt_are_nonsense(answer: dict[str, Any]) -> None:
    with pytest.raises(EngineProtocolError):
        scores(answer, [1, 2, 3], 1)
