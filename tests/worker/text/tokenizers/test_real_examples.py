"""What is learned of a conversation, by real tokenizers and their own templates."""

from __future__ import annotations

import pytest

from ryzanstein.generation.prompts import Message, Role
from ryzanstein.tools.finetune.data.chats import Encoder
from ryzanstein.tools.finetune.data.records import format_of, item_of

from .conftest import Real

pytestmark = pytest.mark.lab
SAID = ("Hello there, Anna.", "It rains <b>often</b> in Rome.")
ASKED = ("Hi, I am Anna.", "And the weather?")


def test_answers_are_learned_after_the_prompt_that_is_served_with_what_ends_them(real: Real) -> None:
    text = real.model
    value = {
        "messages": [
            {"role": role, "content": content}
            for pair in zip(ASKED, SAID, strict=True)
            for role, content in zip(("user", "assistant"), pair, strict=True)
        ]
    }
    examples = Encoder(text).examples(item_of(value, format_of(value)))
    spans = [(example, span) for example in examples for span in example.learned]
    assert len(spans) == len(SAID)
    history: list[Message] = []
    for (example, (start, end)), asked, said in zip(spans, ASKED, SAID, strict=True):
        history.append(Message(Role.USER, asked))
        assert list(example.ids)[:start] == text.encode_chat(history)
        answer = list(example.ids)[start:end]
        assert said in text.spelled(answer)
        assert text.is_control(answer[-1])
        assert text.decode(answer).strip().endswith(said)
        history.append(Message(Role.ASSISTANT, said))
