"""What an interrupted run leaves, what others do to DST meanwhile, and links."""

import io
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ryzanstein.tools.atomic import put_in_place
from ryzanstein.tools.quantize.partial import QUANTIZATION, TRAINING, PartialModel, begun_with
from ryzanstein.tools.quantize.request import Request
from ryzanstein.tools.quantize.run import quantize_model
from ryzanstein.worker.refusal import ModelRefused

from .conftest import run
from .test_command import contents


class Disturbed(io.StringIO):
    """Does something when a line is written."""

    def __init__(self, line: str, disturb: Callable[[], None]) -> None:
        super().__init__()
        self.line, self.disturb = line, disturb

    def write(self, text: str) -> int:
        if self.line in text:
            self.disturb()
        return super().write(text)


def test_an_interruption_in_the_first_layer_has_an_owner(tmp_path: Path) -> None:
    target = tmp_path / "model"
    with PartialModel.open(target, {"SRC": "one"}) as partial:
        (partial.model / "tokenizer.json").write_text("of one")
    with pytest.raises(ModelRefused, match="SRC 'one', now 'other'"), PartialModel.open(target, {"SRC": "other"}):
        pass
    with PartialModel.open(target, {"SRC": "one"}) as partial:
        assert (partial.model / "tokenizer.json").read_text() == "of one"


def test_what_was_measured_at_the_start_is_known_to_the_run_that_goes_on(tmp_path: Path) -> None:
    target = tmp_path / "model"
    assert begun_with(target, "--compute", TRAINING) is None
    with PartialModel.open(target, {"--compute": "bfloat16"}, TRAINING):
        pass
    assert begun_with(target, "--compute", TRAINING) == "bfloat16"
    assert begun_with(target, "--compute", QUANTIZATION) is None
    (tmp_path / ".model.finetuning/state.json").write_text("{")
    assert begun_with(target, "--compute", TRAINING) is None


def test_files_without_an_owner_are_not_used(tmp_path: Path) -> None:
    left = tmp_path / ".model.quantizing" / "model"
    left.mkdir(parents=True)
    (left / "tokenizer.json").write_text("nobody's")
    with PartialModel.open(tmp_path / "model", {"SRC": "one"}) as partial:
        assert list(partial.model.iterdir()) == []


def test_a_kill_after_the_renaming_begins_again(llama: Path, tmp_path: Path) -> None:
    """All layers are in state.json, and their files have become DST."""

    class Killed(BaseException):
        pass

    def kill() -> None:
        raise Killed

    target, request = tmp_path / "model", Request("rtn")
    with torch.inference_mode():
        quantize_model(llama, tmp_path / "whole", request, io.StringIO())
        with pytest.raises(Killed):
            quantize_model(llama, target, request, Disturbed(" MB: ", kill))
        put_in_place(tmp_path / ".model.quantizing" / "model", target)
        quantize_model(llama, target, request, io.StringIO(), force=True)
    assert contents(target) == contents(tmp_path / "whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "whole"]


def test_what_appears_at_dst_meanwhile_stays(llama: Path, tmp_path: Path) -> None:
    target = tmp_path / "model"

    def appear() -> None:
        target.mkdir()
        (target / "config.json").write_text("theirs")

    with torch.inference_mode(), pytest.raises(ModelRefused, match="exists already"):
        quantize_model(llama, target, Request("rtn"), Disturbed("layer 1 of", appear))
    assert contents(target) == {"config.json": b"theirs"}
    shutil.rmtree(target)
    again = run(llama, target, "--method", "rtn")
    assert again.returncode == 0
    assert "layers are done already" in again.stderr
    assert "layer 1 of" not in again.stderr


def test_a_link_is_followed(llama: Path, tmp_path: Path) -> None:
    real, link = tmp_path / "disk" / "real", tmp_path / "link"
    real.mkdir(parents=True)
    link.symlink_to(real)
    assert run(llama, link, "--method", "rtn").returncode == 0
    assert run(llama, link, "--method", "rtn", "--force").returncode == 0
    assert link.is_symlink()
    assert (real / "model.safetensors.index.json").exists()
    assert os.listdir(real.parent) == ["real"]


def test_a_link_to_nothing_is_refused(llama: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "absent")
    refused = run(llama, link, "--method", "rtn", "--force")
    assert (refused.returncode, refused.stderr) == (1, f"{link} is a link to nothing\n")
    assert [path.name for path in tmp_path.iterdir()] == ["link"]


@pytest.mark.parametrize("place", [".", ".."])
def test_a_place_without_a_name_is_refused(place: str, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "inner").mkdir()
    monkeypatch.chdir(tmp_path / "inner")
    refused = run(llama, place, "--method", "rtn")
    assert refused.returncode == 1
    assert refused.stderr.startswith(f"{place}: a directory is written under its name")
