"""The commands of `ryzanstein`, from what they print with `--help`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import typer.main

from ryzanstein.cli.main import build
from ryzanstein.lab.reference.markdown import GENERATED, table

_ROOT = Path(__file__).resolve().parents[4]
# Their help lists all settings, which have a page.
_SERVICES = ("router", "orchestrator", "worker", "console")
# What help prints may depend on the terminal and the home directory, but not here.
_ENVIRONMENT = {"COLUMNS": "100", "TYPER_USE_RICH": "0", "NO_COLOR": "1", "HOME": "/home/user", "XDG_CACHE_HOME": ""}
_INTRODUCTION = f"""# The command line

{GENERATED}

Exit codes: 0 success, 1 the request failed (no answer, a refusal of the cluster, a directory or a port in use), 2 wrong usage
(the message names the option and its bound), 130 interrupted.
"""


def commands_page() -> str:
    """Returns the page: a table of all commands, then the help of each."""
    commands = getattr(typer.main.get_command(build()), "commands")  # noqa: B009 (a group of click)
    rows = [(f"`ryzanstein {name}`", command.get_short_help_str(200)) for name, command in commands.items()]
    lines = [_INTRODUCTION, *table(("command", "what it does"), rows)]
    lines += ["The options of `router`, `orchestrator`, `worker` and `console` are their [settings](settings.md).", ""]
    visible = [name for name in commands if name not in _SERVICES]
    with ThreadPoolExecutor(4) as pool:
        for name, text in zip(visible, pool.map(_help, visible), strict=True):
            lines += [f"## {name}", "", "```text", text, "```", ""]
    return "\n".join(lines)


def _help(name: str) -> str:
    command = [sys.executable, "-P", "-m", "ryzanstein.cli", name, "--help"]
    environment = {**os.environ, **_ENVIRONMENT}
    text = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=120).stdout
    visible = re.sub(rf"python3? \-m [\w.]+( {name})?", f"ryzanstein {name}", text.replace(f"{_ROOT}/", ""))
    return "\n".join(line.rstrip() for line in visible.strip().splitlines())
