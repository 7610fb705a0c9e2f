"""Calibration windows: whole ones, and none that is both fitted to and held out."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from ryzanstein.tools.quantize.texts import read_texts
from ryzanstein.worker.refusal import ModelRefused

from .conftest import CONTEXT


def test_windows_are_whole_whatever_the_tokenizer_asks_for(llama: Path, text: Path, tmp_path: Path) -> None:
    content = json.loads((llama / "tokenizer.json").read_text())
    content["truncation"] = {"direction": "Right", "max_length": 64, "strategy": "LongestFirst", "stride": 0}
    content["padding"] = {
        "strategy": {"Fixed": 2**14},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "x",
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    expected = read_texts(llama / "tokenizer.json", [text], 2000, CONTEXT)
    assert read_texts(tmp_path / "tokenizer.json", [text], 2000, CONTEXT).digest == expected.digest


@pytest.mark.parametrize("link", [False, True])
def test_one_file_twice_is_refused(link: bool, llama: Path, text: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.txt" if link else text
    if link:
        other.symlink_to(text)
    with pytest.raises(ModelRefused, match="the same file as"):
        read_texts(llama / "tokenizer.json", [text, other], 2000, CONTEXT)


def test_a_copy_adds_nothing(llama: Path, text: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copy(text, tmp_path / "copy.txt"))
    found = read_texts(llama / "tokenizer.json", [text, copy], 2000, CONTEXT)
    windows_WT = torch.cat([found.fit_WT, found.held_WT])
    assert len(windows_WT.unique(dim=0)) == len(windows_WT)
