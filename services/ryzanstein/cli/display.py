"""What people see: consoles, errors, numbers. Data goes to standard output, everything about it to standard error."""

from __future__ import annotations

import json
from typing import Any

from rich.console import Console
from rich.text import Text

from ryzanstein.cli.service_process import ServiceFailedError
from ryzanstein.errors import Code, RyzansteinError

_FILE_WIDTH = 160


def people() -> Console:
    """For prose: progress, errors, hints."""
    return Console(stderr=True, highlight=False)


def output() -> Console:
    """For what was asked for. Plain when it is not a terminal, and then wide: a file has no edge to wrap at."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=_FILE_WIDTH)


def print_json(value: Any) -> None:
    """One JSON document on standard output."""
    print(json.dumps(value, indent=2), flush=True)


def show_failure(console: Console, failure: ServiceFailedError) -> None:
    """A service that did not start or ended, with its last log lines."""
    console.print(Text(str(failure), style="red"), soft_wrap=True)


def show_error(console: Console, error: RyzansteinError) -> None:
    """One sentence that says what is wrong, with the reason in brackets; then what it does not say: further fields, what is
    missing, and when to come back."""
    console.print(Text.assemble(("error: ", "bold red"), f"{_sentence(error)} ({_reason(error)})"), soft_wrap=True)
    for violation in error.violations:
        if not error.message.startswith(f"{violation.field}: "):
            console.print(Text.assemble("  field ", (violation.field, "bold"), f": {violation.description}"), soft_wrap=True)
    if error.resource is not None and error.resource[1] not in error.message:
        console.print(Text(f"  {error.resource[0]}: {error.resource[1]}"), soft_wrap=True)
    if error.retry_after_s is not None:
        console.print(Text(f"  try again in {error.retry_after_s:g} s"))
    if error.reason == Code.UNAVAILABLE.name:  # nobody of ours said so: no service answered
        console.print(Text("  is the cluster running? `ryzanstein up` starts one"))


def _sentence(error: RyzansteinError) -> str:
    """A wrong field is its subject: `sampling.temperature must be in [0, 2], got 3`."""
    for violation in error.violations:
        if error.message.startswith(f"{violation.field}: "):
            return error.message.replace(": ", " ", 1)
    return error.message


def _reason(error: RyzansteinError) -> str:
    return error.code.name if error.reason in ("", error.code.name) else f"{error.code.name}, {error.reason}"


def milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.0f} ms"


def binary_bytes(count: int) -> str:
    return f"{count / 2**20:.0f} MiB"
