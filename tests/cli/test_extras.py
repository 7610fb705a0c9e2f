"""A command that lacks packages says which extra has them."""

from __future__ import annotations

import pytest
import typer

from ryzanstein.cli import programs as extras
from ryzanstein.cli.watch.command import WatchOptions, watch
from ryzanstein.rpc.client import PLAIN
from ryzanstein.survey.reach import KeyedRouter


@pytest.mark.parametrize(
    ("missing", "wanted"),
    [(("torch",), "worker"), (("uvicorn",), "router"), (("msgspec", "tokenizers"), "router,worker")],
)
def test_missing_packages_are_a_sentence_that_names_the_extra(
    missing: tuple[str, ...], wanted: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda name: None if name in missing else object())
    with pytest.raises(typer.Exit) as ended:
        extras.require("up", "router", "worker")
    assert ended.value.exit_code == 2
    assert f"pip install 'ryzanstein[{wanted}]'" in capsys.readouterr().err


def test_a_watch_at_a_terminal_says_what_it_needs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda name: None if name == "textual" else object())
    monkeypatch.setattr("ryzanstein.cli.watch.command._paintable", lambda: True)
    with pytest.raises(typer.Exit) as ended:
        watch("127.0.0.1:1", KeyedRouter("127.0.0.1:1"), PLAIN, WatchOptions())
    assert ended.value.exit_code == 2
    told = "`ryzanstein status --watch` needs more than the base package: pip install 'ryzanstein[watch]'\n"
    assert capsys.readouterr().err == told


def test_with_all_packages_nothing_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    extras.require("up", "router", "worker")
    assert capsys.readouterr() == ("", "")
