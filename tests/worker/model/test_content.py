"""Files that are replaced under the same path: no rank and no node serves two contents in silence."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ryzanstein.worker.checkpoints.content import ModelContent, Seen
from ryzanstein.worker.model import loading
from ryzanstein.worker.refusal import CheckpointError, ModelRefused


def change(model_dir: Path, name: str = "model.layers.0.mlp.down_proj.weight") -> None:
    """Replaces the file by one with other numbers in a tensor, as long as the old one."""
    tensors = load_file(model_dir / "model.safetensors")
    tensors[name] = tensors[name] + 1
    save_file(tensors, model_dir / "new", {"format": "pt"})
    os.replace(model_dir / "new", model_dir / "model.safetensors")


def test_copies_have_the_same_content_and_other_weights_another(
    checkpoint: Callable[..., Path], runner: Callable[..., Any], tmp_path: Path
) -> None:
    model_dir = checkpoint()
    copied = shutil.copytree(model_dir, tmp_path / "other name")
    first, second = runner(model_dir), runner(copied)
    assert first.content == second.content
    assert first.numerics == second.numerics
    change(copied)
    third = runner(copied)
    assert third.content != first.content
    assert third.numerics != first.numerics
    assert third.page_format == first.page_format


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_other_files_of_the_model_count_too(name: str, tmp_path: Path) -> None:
    digests = set()
    for text in ("{}", "{ }", "[]"):
        (tmp_path / name).write_text(text)
        digests.add(ModelContent.of(tmp_path, [], Seen.of(tmp_path)).digest)
    assert len(digests) == 3


def test_a_large_file_is_read_at_places_spread_over_it(tmp_path: Path) -> None:
    path, numbers = tmp_path / "a", bytearray(os.urandom(4 * 2**20))
    digests = set()
    for at in (None, 3, len(numbers) // 2, len(numbers) - 1):
        if at is not None:
            begin = at // 2**16 * 2**16
            numbers[begin : begin + 2**16] = os.urandom(2**16)
        path.write_bytes(numbers)
        digests.add(ModelContent.of(path, [str(path)], Seen.of(path)).digest)
    assert len(digests) == 4


def test_a_file_that_is_replaced_while_it_is_loaded_is_refused(
    checkpoint: Callable[..., Path], runner: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model_dir = checkpoint()
    decoder = loading.Decoder
    loaded: list[object] = []

    def replaced(*arguments: Any) -> object:
        loaded.append(decoder(*arguments))
        if len(loaded) == 2:  # after that of shapes
            change(model_dir)
        return loaded[-1]

    monkeypatch.setattr(loading, "Decoder", replaced)
    with pytest.raises(CheckpointError, match="its files changed while they were read: load the model again"):
        runner(model_dir)


def test_a_file_that_is_replaced_behind_its_header_is_refused(checkpoint: Callable[..., Path]) -> None:
    model_dir = checkpoint()
    seen = Seen.of(model_dir)
    change(model_dir)
    with pytest.raises(CheckpointError, match="its files changed"):
        ModelContent.of(model_dir, [str(model_dir / "model.safetensors")], seen)


class TwoRanks:
    """The sums of this rank and of another one that has read other files, or the same."""

    def __init__(self, other: bytes) -> None:
        self._other = other

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) == 1:
            return x.mul_(2)
        return x.add_(torch.tensor([0.0, 1.0, *loading._telling(self._other)]))


@pytest.mark.parametrize("same", [True, False])
def test_ranks_that_read_different_files_refuse_the_model(
    same: bool, checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from ryzanstein.worker.collectives.local import LocalCollectives
    from ryzanstein.worker.collectives.parallel import TensorParallel
    from ryzanstein.worker.settings.options import RunnerOptions

    model_dir = checkpoint()
    options = RunnerOptions(num_blocks=64, block_size=4, num_threads=1)
    mine = loading._agreed(model_dir, TensorParallel(0, 1, LocalCollectives()), options).content.digest
    other = mine if same else bytes([mine[0] ^ 1]) + mine[1:]
    tp = TensorParallel(0, 2, TwoRanks(other))  # type: ignore[arg-type]
    if same:
        assert loading._agreed(model_dir, tp, options).content.digest == mine
    else:
        with pytest.raises(ModelRefused, match="the ranks read different files"):
            loading._agreed(model_dir, tp, options)
