"""A model's own values count where a request says nothing, and nowhere else."""

from __future__ import annotations

from ryzanstein.generation.request import NAMES, NO_DEFAULTS, SamplingDefaults, SamplingParams
from ryzanstein.v1 import inference_pb2 as inference
from ryzanstein.wire.requests import sampling_defaults_from_wire, sampling_defaults_to_wire, sampling_from_wire

QWEN = SamplingDefaults(temperature=0.6, top_p=0.95, top_k=20)


def test_what_a_request_leaves_out_is_filled_in() -> None:
    asked = sampling_from_wire(inference.SamplingParams(temperature=1.0, min_p=0.0, max_tokens=5))
    assert asked.unset == {"top_p", "top_k", "repetition_penalty"}
    filled = QWEN.filled(asked, seed=7, keep_prompt_head=3)
    assert (filled.temperature, filled.top_p, filled.top_k, filled.repetition_penalty) == (1.0, 0.95, 20, 1.0)
    assert (filled.max_tokens, filled.unset) == (5, frozenset()), "what is filled in once stays"
    assert (filled.seed, filled.keep_prompt_head) == (7, 3)
    assert SamplingDefaults(top_k=1).filled(filled, seed=7, keep_prompt_head=3) == filled


def test_without_defaults_nothing_changes() -> None:
    asked = sampling_from_wire(inference.SamplingParams())
    assert asked.unset == set(NAMES)
    assert NO_DEFAULTS.filled(asked, seed=None, keep_prompt_head=None) == SamplingParams()
    assert sampling_defaults_to_wire(NO_DEFAULTS) is None


def test_they_come_over_the_wire_as_they_are_and_what_no_request_may_have_is_ignored() -> None:
    wire = sampling_defaults_to_wire(QWEN)
    assert wire is not None
    assert sampling_defaults_from_wire(wire) == QWEN
    wrong = inference.SamplingDefaults(temperature=9, top_p=0, top_k=3, repetition_penalty=float("nan"))
    assert sampling_defaults_from_wire(wrong) == SamplingDefaults(top_k=3)
