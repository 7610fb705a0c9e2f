"""What was trained on real models is read by transformers and by llama.cpp, and was trained as peft trains."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.worker.model.gguf.judges.learning.conftest import NEW_TOKENS, LearnedModel, Talk
from tests.worker.model.gguf.judges.learning.facts import facts, share

from ryzanstein.generation.prompts import Message, Role
from ryzanstein.tools.convert.from_checkpoint import WRITTEN, to_file
from ryzanstein.tools.convert.to_checkpoint import to_directory
from ryzanstein.tools.finetune.base.adapter import targets_of, with_adapter
from ryzanstein.tools.finetune.base.linear import BlocksLinear
from ryzanstein.tools.finetune.base.model import build
from ryzanstein.tools.finetune.base.opening import Base
from ryzanstein.tools.finetune.merging import with_trained
from ryzanstein.tools.finetune.request import LoraShape
from ryzanstein.tools.finetune.training.loss import summed_loss
from ryzanstein.worker.kernels.functions import block_types
from ryzanstein.worker.text.tokenizer import TextModel

pytestmark = pytest.mark.timeout(3000)
NUM_JUDGED, LLAMA_STEPS, LOSS_STEPS = 10, 64, 50
TIE = 0.05
"""How much less likely than the likeliest one a token of llama.cpp's may be, which keeps keys and values in 16 bits, in nat."""


def prompts(learned: LearnedModel, asked: Sequence[str]) -> list[list[int]]:
    text = learned.text
    return [text.encode_chat([Message(Role.USER, each)]) for each in asked]


def log_probs(model: Any, ids: Sequence[int]) -> torch.Tensor:
    """Of every position, [T, V]."""
    with torch.no_grad():
        return torch.log_softmax(model(torch.tensor([list(ids)])).logits[0].float(), -1)


def floats_of(file: Path, folder: Path) -> Path:
    """The same numbers in float32, for llama.cpp not to round inputs to 8 bits."""
    to_directory(file, folder / "floats", block_types.F32, StringIO())
    to_file(folder / "floats", folder / "floats.gguf", WRITTEN["f32"], StringIO())
    return folder / "floats.gguf"


def test_llama_cpp_reads_the_adapter_that_transformers_has(
    learned: LearnedModel, talk: Talk, llama_cpp_answers: Callable[..., list[list[int]]], tmp_path: Path
) -> None:
    """The same likeliest tokens, also beyond the ends of answers."""
    asked = prompts(learned, talk.asked[:NUM_JUDGED])
    theirs = llama_cpp_answers(floats_of(learned.file, tmp_path), learned.gguf, asked, LLAMA_STEPS)
    with Base.open(learned.file) as base:
        model = with_trained(base, learned.adapter).eval()
    lost, same = [], []
    for prompt, answer in zip(asked, theirs, strict=True):
        expected = log_probs(model, prompt + answer[:-1])[len(prompt) - 1 :]
        chosen = expected[torch.arange(len(answer)), torch.tensor(answer)]
        lost.append(float((expected.max(-1).values - chosen).max()))
        same.append(float((expected.argmax(-1) == torch.tensor(answer)).float().mean()))
    print(f"{learned.name}: llama.cpp has {min(same):.1%} to {max(same):.1%} of the tokens, {max(lost):.4f} nat off")
    assert share([each == 1.0 for each in same]) >= 0.9
    assert max(lost) < TIE


def test_llama_cpp_answers_as_the_cluster_on_the_same_file(
    learned: LearnedModel, talk: Talk, llama_cpp_answers: Callable[..., list[list[int]]]
) -> None:
    """Both round inputs to 8 bits, each in its own way: where two tokens are as likely an answer may be another one."""
    text = learned.text
    asked = prompts(learned, talk.asked[: 2 * NUM_JUDGED])
    found = llama_cpp_answers(learned.file, learned.gguf, asked, NEW_TOKENS)
    ends = [next((place for place, token in enumerate(ids) if token in text.eos_token_ids), len(ids)) for ids in found]
    answers = [text.decode(ids[:end]) for ids, end in zip(found, ends, strict=True)]
    same = share([each == heard.text for each, heard in zip(answers, talk.adapted, strict=False)])
    print(f"{learned.name}: llama.cpp has {same:.0%} of the cluster's answers")
    assert same >= 0.95


def losses(base: Base, model: Any, text: TextModel) -> list[float]:
    """Of steps of AdamW, each on one fact: the whole conversation is learned."""
    adapted = with_adapter(model, targets_of(model, base.spec, ("all",)), LoraShape(), seed=1)
    optimizer = torch.optim.AdamW([each for each in adapted.parameters() if each.requires_grad], lr=5e-4)
    found = []
    for fact in facts(LOSS_STEPS, 3):
        messages = [Message(Role.USER, fact.said), Message(Role.ASSISTANT, fact.told)]
        ids_NT = torch.tensor([text.encode_chat(messages)])
        inputs = {"input_ids": ids_NT[:, :-1], "shift_labels": ids_NT[:, 1:]}
        loss = summed_loss(adapted.get_base_model(), inputs) / (ids_NT.numel() - 1)
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss.detach()))
    return found


def test_the_loss_curve_is_that_of_plain_peft_on_the_floats_of_the_same_blocks(smollm2: Path) -> None:
    text = TextModel.load(smollm2)
    with Base.open(smollm2) as base:
        ours, plain = build(base), build(base, floats=True)
        assert sum(isinstance(module, BlocksLinear) for module in ours.modules()) > 200
        assert not any(isinstance(module, BlocksLinear) for module in plain.modules())
        found, expected = losses(base, ours, text), losses(base, plain, text)
    off = max(abs(a - b) / b for a, b in zip(found, expected, strict=True))
    print(f"smollm2: {expected[0]:.3f} to {expected[-1]:.3f} in {LOSS_STEPS} steps, at most {off:.1e} off")
    assert off < 1e-3
    assert sum(expected[-5:]) < 0.5 * sum(expected[:5])
