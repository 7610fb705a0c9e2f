"""A tied pair of embedding and head that is stored once, under either name."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from ryzanstein.worker.engine.plan import StepPlan
from ryzanstein.worker.model.runner import ModelRunner


def test_a_pair_that_is_stored_under_the_heads_name_alone_is_read(
    checkpoint: Callable[..., Path], runner: Callable[..., ModelRunner], tmp_path: Path
) -> None:
    directory = checkpoint(tie_word_embeddings=True)
    other = tmp_path / "other"
    shutil.copytree(directory, other)
    (file,) = other.glob("*.safetensors")
    tensors = load_file(file)
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, file, {"format": "pt"})
    plan = StepPlan(1, [3, 1, 2], [3], [0], [[0]], [0], True)
    assert torch.equal(runner(other).hidden_logits(plan), runner(directory).hidden_logits(plan))
