"""`ryzanstein profile`: what is wrong with its arguments is said before a node waits for work."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from ryzanstein.cli.main import build


def said(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(build(), ["profile", *words], env={"COLUMNS": "200"})
    return done.exit_code, done.output


def test_a_file_that_is_there_is_kept(tmp_path: Path) -> None:
    (tmp_path / "there").write_text("mine")
    assert said("node-0", "-o", str(tmp_path / "there")) == (1, f"{tmp_path / 'there'} is there already\n")
    assert (tmp_path / "there").read_text() == "mine"


def test_a_directory_that_is_missing_is_named(tmp_path: Path) -> None:
    code, text = said("node-0", "-o", str(tmp_path / "missing" / "file"))
    assert (code, text) == (1, f"there is no directory {tmp_path / 'missing'}\n")


@pytest.mark.parametrize("words", [(), ("node-0", "--direct", "127.0.0.1:1")])
def test_one_node_is_profiled(words: tuple[str, ...]) -> None:
    code, text = said(*words)
    assert code == 2
    assert "either a NODE or --direct" in text


def test_a_node_that_does_not_answer_is_an_error_and_leaves_no_file(tmp_path: Path) -> None:
    code, text = said("--direct", "127.0.0.1:1", "-o", str(tmp_path / "file"))
    assert code == 1
    assert "UNAVAILABLE" in text
    assert not (tmp_path / "file").exists()
