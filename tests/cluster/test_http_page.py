"""Every example of docs/reference/http.md is run against a cluster."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PAGE = (Path(__file__).parents[2] / "docs/reference/http.md").read_text()
BLOCKS = re.findall(r"^```(sh|python)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
COMMANDS = [line for kind, block in BLOCKS if kind == "sh" for line in block.splitlines()]
PROGRAMS = [block for kind, block in BLOCKS if kind == "python"]


def here(text: str, calm: Any) -> str:
    return text.replace("http://127.0.0.1:8000", calm.cluster.http_url)


@pytest.mark.parametrize("line", COMMANDS, ids=lambda line: line.split()[2])
def test_a_command_works(calm: Any, line: str) -> None:
    words = shlex.split(here(line, calm))
    done = subprocess.run([words[0], "--fail", *words[1:]], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("{")


@pytest.mark.parametrize("program", PROGRAMS, ids=["attach", "responses"])
def test_a_program_works(calm: Any, program: str) -> None:
    done = subprocess.run([sys.executable, "-c", here(program, calm)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert re.search(r"Tavik|^[0-9a-f]{32}$", done.stdout, re.MULTILINE)
