from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ryzanstein.worker.text.choice import ChoiceText
from ryzanstein.worker.text.tokenizer import TextModel

stops = st.lists(st.text("aeinot .", min_size=1, max_size=4), max_size=3)


@pytest.fixture(scope="session")
def model(model_dir) -> TextModel:
    return TextModel.load(model_dir)


@given(data=st.data(), stop=stops)
@settings(max_examples=200, deadline=None)
def test_after_a_replay_every_later_text_is_that_of_the_undisturbed_run(model, data, stop) -> None:
    token_ids = data.draw(st.lists(st.integers(0, model.vocab_size - 1), max_size=30))
    k = data.draw(st.integers(0, len(token_ids)))
    undisturbed, resumed = ChoiceText(model, stop), ChoiceText(model, stop)
    outputs = [undisturbed.push(token_id) for token_id in token_ids]
    resumed.replay(token_ids[:k])
    assert [resumed.push(token_id) for token_id in token_ids[k:]] == outputs[k:]
    assert resumed.flush() == undisturbed.flush()


@given(data=st.data(), stop=stops)
@settings(max_examples=200, deadline=None)
def test_the_texts_together_are_the_decoded_text_before_the_first_stop_string(model, data, stop) -> None:
    token_ids = data.draw(st.lists(st.integers(0, model.vocab_size - 1), max_size=30))
    choice = ChoiceText(model, stop)
    said = "".join([choice.push(token_id).text for token_id in token_ids]) + choice.flush()
    whole = model.decode(token_ids)
    ends = [end for end in range(len(whole) + 1) if whole[:end].endswith(tuple(stop))] if stop else []
    if ends:
        longest = max(len(s) for s in stop if whole[: ends[0]].endswith(s))
        whole = whole[: ends[0] - longest]
    assert said == whole


def test_a_stop_string_across_tokens_stops_at_its_last_token(write_model) -> None:
    model = TextModel.load(write_model("byte_level"))
    token_ids = model.encode("the quick brown fox")
    choice = ChoiceText(model, ["ick br"])
    outputs = [choice.push(token_id) for token_id in token_ids]
    assert "".join(output.text for output in outputs) == "the qu"
    assert outputs[-1].stopped
    assert not outputs[0].stopped


def test_the_last_token_carries_what_was_held_back(write_model) -> None:
    model = TextModel.load(write_model("byte_level"))
    choice = ChoiceText(model, ["fox jumps"])
    said = "".join(choice.push(token_id).text for token_id in model.encode("the fox"))
    assert (said, choice.flush()) == ("the ", "fox")
