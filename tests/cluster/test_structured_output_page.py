"""Every example of docs/build/structured-output.md is run against a cluster."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.cluster.test_readme import as_command, here

PAGE = (Path(__file__).parents[2] / "docs/build/structured-output.md").read_text()
BLOCKS = re.findall(r"^```(sh|python)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
COMMANDS = [line for kind, block in BLOCKS if kind == "sh" for line in block.splitlines()]


@pytest.mark.parametrize("line", COMMANDS, ids=lambda line: line.split()[0])
def test_a_command_of_the_page_works(calm: Any, line: str) -> None:
    done = subprocess.run(as_command(line, calm), capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    (choice,) = json.loads(done.stdout)["choices"]
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    assert text in ("yes", "no") or re.fullmatch("20[0-9]{2}-(0[1-9]|1[0-2])", text)


def test_the_program_of_the_page_works(calm: Any) -> None:
    (program,) = (block for kind, block in BLOCKS if kind == "python")
    done = subprocess.run([sys.executable, "-c", here(program, calm)], capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    assert re.match("mood='(glad|sad)' count=[123]", done.stdout)
