from __future__ import annotations

import asyncio
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ryzanstein.worker.text.choice import ChoiceText, TextOptions, resumed
from ryzanstein.worker.text.tokenizer import TextModel

stops = st.lists(st.text("aeinot .", min_size=1, max_size=4), max_size=3)


@pytest.fixture(scope="session")
def model(model_dir) -> TextModel:
    return TextModel.load(model_dir)


@given(data=st.data(), stop=stops)
@settings(max_examples=60, deadline=None)
def test_after_a_replay_every_later_text_is_that_of_the_undisturbed_run(model, data, stop) -> None:
    token_ids = data.draw(st.lists(st.integers(0, model.vocab_size - 1), max_size=30))
    assert_resumes_at_every_cut(model, token_ids, stop, data.draw(st.integers(1, 31)), data.draw(st.integers(0, 20)))


def test_a_stop_string_ends_nothing_within_min_tokens(model) -> None:
    token_ids = model.encode("ab ab ab ab")
    whole = len(token_ids)
    for min_tokens in range(whole + 1):
        choice = ChoiceText(model, TextOptions(["ab"], min_tokens=min_tokens))
        outputs = [choice.push(token_id) for token_id in token_ids]
        assert all(i > min_tokens for i, output in enumerate(outputs, 1) if output.stopped)
        message = "".join(output.text for output in outputs) + choice.flush()
        assert choice.stopped or message == model.decode(token_ids)
        if min_tokens in (0, whole):
            assert choice.stopped == (min_tokens == 0)


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_a_stop_string_or_a_character_that_spans_the_cut_is_seen(model, data) -> None:
    """The stop strings are parts of a text in which most characters are several tokens, as they are and one longer."""
    text = data.draw(st.text("ab ñ日👋\u200d", min_size=1, max_size=12)) + data.draw(st.sampled_from(["", "the end"]))
    begin, end = sorted(data.draw(st.tuples(st.integers(0, len(text) - 1), st.integers(1, len(text)))))
    stop = [text[begin : end + 1], text[begin : end + 1] + "#"]
    assert_resumes_at_every_cut(model, model.encode(text), stop, data.draw(st.integers(1, 5)))


def assert_resumes_at_every_cut(
    model: TextModel, token_ids: list[int], stop: list[str], slice_tokens: int, least: int = 0
) -> None:
    options = TextOptions(stop, min_tokens=least)
    undisturbed = ChoiceText(model, options)
    outputs = [undisturbed.push(token_id) for token_id in token_ids]
    rest = undisturbed.flush()
    for k in range(len(token_ids) + 1):
        resumed = ChoiceText(model, options)
        for start in range(0, k, slice_tokens):
            resumed.replay(token_ids[start : min(start + slice_tokens, k)])
        assert resumed.stopped == (k > 0 and outputs[k - 1].stopped)
        assert [resumed.push(token_id) for token_id in token_ids[k:]] == outputs[k:]
        assert resumed.flush() == rest
        if token_ids[k:]:
            replayed, after_all = ChoiceText(model), ChoiceText(model)
            replayed.replay(token_ids[:k])
            for token_id in token_ids[:k]:
                after_all.push(token_id)
            assert replayed.next_bytes(token_ids[k]) == after_all.next_bytes(token_ids[k])


async def test_a_long_answer_is_resumed_without_holding_the_loop(model) -> None:
    """32,768 tokens and four stop strings, which took two thirds of a second at once; the bound is for a busy machine."""
    token_ids = (model.encode("the quick brown fox, Füße ") * 10_000)[:32_768]
    lags: list[float] = []

    async def watch() -> None:
        while True:
            began = time.perf_counter()
            await asyncio.sleep(0)
            lags.append(time.perf_counter() - began)

    watching = asyncio.create_task(watch())
    choice = await resumed(model, TextOptions(["\nUser:", "###", "fox jumps", "zzzz" * 16]), token_ids)
    watching.cancel()
    assert not choice.stopped
    assert len(lags) > 10
    assert max(lags) < 0.05, max(lags)


@given(data=st.data(), stop=stops)
@settings(max_examples=200, deadline=None)
@pytest.mark.long
def test_the_texts_together_are_the_decoded_text_before_the_first_stop_string(model, data, stop) -> None:
    token_ids = data.draw(st.lists(st.integers(0, model.vocab_size - 1), max_size=30))
    choice = ChoiceText(model, TextOptions(stop))
    message = "".join([choice.push(token_id).text for token_id in token_ids]) + choice.flush()
    whole = model.decode(token_ids)
    ends = [end for end in range(len(whole) + 1) if whole[:end].endswith(tuple(stop))] if stop else []
    if ends:
        longest = max(len(s) for s in stop if whole[: ends[0]].endswith(s))
        whole = whole[: ends[0] - longest]
    assert message == whole


def test_a_stop_string_across_tokens_stops_at_its_last_token(write_model) -> None:
    model = TextModel.load(write_model("byte_level"))
    token_ids = model.encode("the quick brown fox")
    choice = ChoiceText(model, TextOptions(["ick br"]))
    outputs = [choice.push(token_id) for token_id in token_ids]
    assert "".join(output.text for output in outputs) == "the qu"
    assert outputs[-1].stopped
    assert not outputs[0].stopped


def test_the_last_token_carries_what_was_held_back(write_model) -> None:
    model = TextModel.load(write_model("byte_level"))
    choice = ChoiceText(model, TextOptions(["fox jumps"]))
    message = "".join(choice.push(token_id).text for token_id in model.encode("the fox"))
    assert (message, choice.flush()) == ("the ", "fox")
