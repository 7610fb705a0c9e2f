"""Has the worker's kernels compiled before the first cluster of a machine starts, and says so."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable

_COMMAND = (sys.executable, "-P", "-m", "ryzanstein.worker.kernels", "--json")


def have_kernels(doing: Callable[[str], None]) -> str:
    """Returns when the kernels are there, or cannot be.

    `doing` receives a line when compiling begins. Returns a line for the user if the kernels were
    compiled now or are not available; empty if they were in the cache. The program ends when we do: its standard input
    ends then.
    """
    with subprocess.Popen(
        _COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as program:
        assert program.stdout is not None
        message: dict[str, object] = {}
        try:
            for line in program.stdout:
                message = json.loads(line)
                if message.get("state") == "compiling":
                    doing(str(message["text"]))
        finally:
            program.kill()  # it has ended, or we are interrupted
    return str(message["text"]) if message.get("compiled_s") or "reason" in message else ""
