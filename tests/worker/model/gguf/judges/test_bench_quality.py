"""llama.cpp as a row of `ryzanstein bench quality`: a process of its own that shares its logits."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from tests.worker.model.gguf import test_architectures
from tests.worker.model.gguf.judges.conftest import PYTHON
from typer.testing import CliRunner

from ryzanstein.lab.bench.engine.__main__ import app
from ryzanstein.lab.bench.quality.llama_model import LlamaFailed, LlamaModel
from ryzanstein.lab.bench.quality.models import ModelRoom

IDS = test_architectures.IDS[0].tolist()
ROOM = ModelRoom(max_tokens=256, at_once=len(IDS), threads=1)


@pytest.fixture
def tiny_dir(tiny: Callable[..., Path]) -> Path:
    return tiny("llama")


@pytest.fixture
def model(tiny_dir: Path, to_gguf: Callable[..., Path]) -> Iterator[LlamaModel]:
    opened = LlamaModel(PYTHON, to_gguf(tiny_dir), ROOM)
    yield opened
    opened.close()


def test_its_logits_are_transformers_whole_or_in_parts(model: LlamaModel, tiny_dir: Path) -> None:
    """It keeps keys and values as 16-bit floats: that is the tolerance."""
    expected = test_architectures.logits(tiny_dir)
    for size in (len(IDS), 7):
        model.restart()
        found = torch.cat([model.advance(IDS[start : start + size]).clone() for start in range(0, len(IDS), size)])
        assert (found - expected).abs().max() < 2e-3 * expected.abs().max()


def test_its_times_are_of_a_new_sequence(model: LlamaModel) -> None:
    model.restart()
    first = model.advance(IDS[:5]).clone()
    times = model.time(IDS[:6], 4)
    assert min(times.prefill_s, times.decode_s) > 0
    assert torch.equal(model.advance(IDS[:5]), first)


def test_a_file_that_it_refuses_is_told_in_its_words_and_leaves_no_process(tmp_path: Path) -> None:
    (tmp_path / "broken.gguf").write_bytes(b"GGUF" + bytes(60))
    with pytest.raises(LlamaFailed, match="gguf"):
        LlamaModel(PYTHON, tmp_path / "broken.gguf", ROOM)
    assert not [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]


def test_a_process_that_ends_is_told(model: LlamaModel) -> None:
    psutil.Process(model._process.pid).kill()
    with pytest.raises(LlamaFailed, match="ended with -9"):
        model.advance(IDS[:5])


def test_a_file_has_a_row_under_both_engines(tiny_dir: Path, to_gguf: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "prose").write_text("The quick brown fox jumps over the lazy dog, and 17 others do not. " * 20)
    path = to_gguf(tiny_dir, "q8_0")
    arguments = [
        *("--model", str(tiny_dir), "--model", str(path), "--formats", "none", "--peers", "llama.cpp"),
        *("--judges", str(PYTHON.parents[1]), "--text", str(tmp_path / "prose"), "--tokens", "90", "--window", "40"),
        *("--prompts", "2", "--prompt-tokens", "20", "--new-tokens", "6", "--prefill-tokens", "30", "--rounds", "1"),
        *("--threads", "1", "--json", str(tmp_path / "quality.json")),
    ]
    done = CliRunner().invoke(app, ["quality", *arguments])
    assert done.exit_code == 0, done.output
    rows: dict[str, Any] = {row["name"]: row for row in json.loads((tmp_path / "quality.json").read_text())["rows"]}
    ours, theirs = rows["model.gguf, none"], rows["model.gguf, llama.cpp"]
    losses = [sum(window[1] for window in row["texts"]["prose"]) for row in (ours, theirs)]
    counts = [sum(window[0] for window in row["texts"]["prose"]) for row in (ours, theirs)]
    assert counts[0] == counts[1] > 80
    assert losses[0] == pytest.approx(losses[1], rel=0.02)
    assert 0 < sum(window[2] for window in theirs["texts"]["prose"]) < 0.02 * counts[1]
    assert min(theirs["memory_bytes"], theirs["prefill_s"][0], theirs["decode_s"][0]) > 0
