"""Tiny random checkpoints with real vocabularies, served: two ranks answer as one does, and keep to a form."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ryzanstein.constraints import Constraint
from ryzanstein.generation.prompts import ChatPrompt, Message, Role

from .conftest import Real

pytestmark = [pytest.mark.lab, pytest.mark.timeout(300)]

SCHEMA = (
    '{"type": "object", "properties": {"a": {"enum": ["x\\ny", "日本"]}}, "required": ["a"], "additionalProperties": false}'
)


@pytest.fixture
def checkpoint(real: Real, tmp_path: Path) -> Path:
    directory = tmp_path / "demo"  # the name that attempts ask for
    torch.manual_seed(1)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(**shape, num_key_value_heads=2, vocab_size=real.model.vocab_size, max_position_embeddings=2048)
    LlamaForCausalLM(config).save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(real.directory / name, directory)
    return directory


async def test_two_ranks_answer_as_one(checkpoint: Path, start_node, connect, attempt) -> None:
    prompt = ChatPrompt((Message(Role.USER, "List:\n- one\n- two\n\n\t日本 🙂"),))
    answers = []
    for tp in (1, 2):
        node = start_node(model=checkpoint, tp=tp)
        node.wait_event("ranks ready")
        async with connect(node.address) as link:
            free = await link.run(attempt(prompt=prompt, max_tokens=24, ignore_eos=True), 60)
            formed = await link.run(attempt(prompt=prompt, max_tokens=200, constraint=Constraint.json_schema(SCHEMA)), 60)
        assert formed.failed is None, formed.failed
        assert json.loads(formed.text())["a"] in ("x\ny", "日本")
        answers.append((free.prompt_tokens, free.tokens(), free.text(), formed.tokens()))
        node.process.terminate()
        node.process.wait()
    assert answers[0] == answers[1]
