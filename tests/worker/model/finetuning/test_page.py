"""The commands of docs/operate/finetune.md do what the page says, on the demonstration model."""

import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.worker.model.finetuning.conftest import DEMO, called, chats

from ryzanstein.tools.finetune.command import finetune
from ryzanstein.tools.finetune.merge_command import merge

PAGE = Path(__file__).parents[4] / "docs/operate/finetune.md"
COMMANDS: dict[str, Callable[..., Any]] = {"finetune": finetune, "merge": merge}


def test_the_commands_of_the_page(data: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data(chats(24))
    monkeypatch.chdir(tmp_path)
    (block,) = (block for block in re.findall(r"^```bash\n(.*?)^```", PAGE.read_text(), re.M | re.S) if "--out" in block)
    done = []
    for line in block.splitlines():
        program, name, *arguments = shlex.split(line.replace("BASE", str(DEMO)))
        assert program == "ryzanstein"
        result = called(COMMANDS[name], *arguments)
        assert result.exit_code == 0, result.output
        done.append((result.stdout, sorted(path.name for path in tmp_path.iterdir())))
    assert done[0] == ("", ["data.jsonl"])
    assert done[1] == (f"facts: an adapter for {DEMO}\n", ["data.jsonl", "facts"])
    assert done[2][1] == ["data.jsonl", "facts", "merged"]
    for name in re.findall(r"`([\w.]+\.(?:json|safetensors|svg))`", PAGE.read_text().split("## What is written")[1]):
        assert (tmp_path / "facts" / name).exists()
