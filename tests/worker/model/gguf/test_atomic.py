"""A directory that is swapped for another: what was there stays until the new one is in its place."""

from __future__ import annotations

from pathlib import Path

import pytest

from ryzanstein.tools.atomic import new_directory
from ryzanstein.tools.written import MARK
from ryzanstein.worker.refusal import ModelRefused


def write(path: Path, text: str, *, force: bool = False) -> None:
    with new_directory(path, force=force) as directory:
        (directory / "config.json").write_text(text)


def test_the_old_one_stays_if_the_swap_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model"
    write(path, "old")
    rename = Path.rename

    def fails(self: Path, target: Path) -> Path:
        if self.name.endswith(".partial"):
            raise OSError(28, "No space left on device")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fails)
    with pytest.raises(OSError, match="No space"):
        write(path, "new", force=True)
    assert (path / "config.json").read_text() == "old"
    assert [each.name for each in tmp_path.iterdir()] == ["model"]


def test_a_file_that_appears_meanwhile_stays(tmp_path: Path) -> None:
    path = tmp_path / "model"
    write(path, "old")

    def meanwhile() -> None:
        with new_directory(path, force=True) as directory:
            (directory / "config.json").write_text("new")
            (path / "mine").write_text("years")

    with pytest.raises(ModelRefused, match=r"\(mine\)"):
        meanwhile()
    assert sorted(each.name for each in path.iterdir()) == [MARK, "config.json", "mine"]
    assert [each.name for each in tmp_path.iterdir()] == ["model"]
