from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from ryzanstein.errors import RyzansteinError
from ryzanstein.lab.bench.engine.peers.catalog import Environment, Format
from ryzanstein.lab.bench.engine.peers.checkpoint import checkpoint
from ryzanstein.lab.bench.engine.peers.conversion import checkpoint_key, converted
from ryzanstein.lab.bench.engine.peers.environment import choose_environments, install
from ryzanstein.lab.bench.engine.peers.process import PeerFailed


def script(text: str) -> Format:
    return Format("copy", (sys.executable, "-c", text, "{model}", "{out}"))


COPY = script("import os, sys; os.mkdir(sys.argv[2]); print(open(sys.argv[1] + '/config.json').read())")
BROKEN = script("import os, sys; os.mkdir(sys.argv[2]); sys.exit('no such layer')")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"0123")
    return folder


async def test_a_checkpoint_is_converted_once(model: Path, tmp_path: Path) -> None:
    path = await converted(model, COPY, tmp_path, "copy", os.environ)
    assert path.is_dir()
    assert await converted(model, BROKEN, tmp_path, "copy", os.environ) == path


async def test_a_conversion_that_fails_is_reported_and_leaves_nothing(model: Path, tmp_path: Path) -> None:
    with pytest.raises(PeerFailed, match="conversion to copy ended with 1: no such layer"):
        await converted(model, BROKEN, tmp_path, "copy", os.environ)
    assert list((tmp_path / "models" / checkpoint_key(model)).iterdir()) == []


def test_other_weights_or_numbers_are_another_checkpoint(model: Path) -> None:
    before = checkpoint_key(model)
    os.utime(model / "model.safetensors", ns=(1, 1))
    weights_changed = checkpoint_key(model)
    (model / "config.json").write_text('{"a": 1}')
    assert len({before, weights_changed, checkpoint_key(model)}) == 3


def test_another_file_is_another_checkpoint(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"0123")
    before = checkpoint_key(file)
    file.write_bytes(b"01234")
    assert before.startswith("model.gguf-")
    assert checkpoint_key(file) != before


def test_a_preset_is_written_once_into_the_cache(tmp_path: Path) -> None:
    path = checkpoint("S", tmp_path)
    written = (path / "model.safetensors").stat().st_mtime_ns
    assert path.parent == tmp_path / "models"
    assert checkpoint("S", tmp_path) == path
    assert (path / "model.safetensors").stat().st_mtime_ns == written


def test_an_unknown_peer_is_not_installed() -> None:
    with pytest.raises(RyzansteinError, match="names: must be one of transformers"):
        choose_environments(["abacus"])


def test_an_installation_that_fails_says_which(tmp_path: Path) -> None:
    with pytest.raises(RyzansteinError, match=r"abacus: .*pip install.* ended with 1"):
        install(tmp_path, "abacus", Environment((str(tmp_path / "nothing"),)))
