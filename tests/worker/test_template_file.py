"""A real node whose model's chat template comes from a file: chats, constrained too, and a file that cannot be compiled."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ryzanstein.constraints import Constraint
from ryzanstein.generation.prompts import ChatPrompt, Message, Role
from ryzanstein.worker.text.tokenizer import TextModel

pytestmark = [pytest.mark.cluster, pytest.mark.long]

TEMPLATE = "{% for m in messages %}<|user|>{{ m.content }} {{ m.content }}{% endfor %}<|assistant|>"


async def test_a_node_chats_with_the_template_of_a_file(
    start_node: Any, connect: Any, attempt: Any, demo_dir: Path, tmp_path: Path
) -> None:
    (file := tmp_path / "twice.jinja").write_text(TEMPLATE)
    node = start_node("--chat-template", str(file), tp=1)
    node.wait_event("ranks ready")
    model = TextModel.load(demo_dir, template_file=file)
    expected = model.encode_prompt(ChatPrompt((Message(Role.USER, "Count from 1 to 5."),)))
    async with connect(node.address) as link:
        stream = await link.run(attempt("Count from 1 to 5.", max_tokens=3))
        assert stream.prompt_tokens == len(expected)
        constrained = await link.run(attempt("Hi.", constraint=Constraint.json_schema('{"const": [1]}'), max_tokens=20))
        assert json.loads(constrained.text()) == [1]


async def test_a_template_that_cannot_be_compiled_fails_the_node_and_says_why(
    start_node: Any, eventually: Any, tmp_path: Path
) -> None:
    (file := tmp_path / "bad.jinja").write_text("{{ messages | unheard_of }}")
    node = start_node("--chat-template", str(file), tp=1)

    async def failed() -> str | None:
        return next((each["reason"] for each in node.events if each.get("state") == "FAILED"), None)

    reason = await eventually(failed, what="the failure")
    assert "unheard_of" in reason
    assert str(file) in reason
