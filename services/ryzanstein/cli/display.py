"""What people see: consoles, errors, numbers.

Data goes to standard output, messages to standard error.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.text import Text

from ryzanstein.cli.processes.service_process import ServiceFailedError
from ryzanstein.client.cleaning import clean
from ryzanstein.errors import Code, RyzansteinError

_FILE_WIDTH = 160
_LINE_EVERY_S = 10.0


def people() -> Console:
    """Returns the console for messages: progress, errors, hints."""
    return Console(stderr=True, highlight=False)


def output() -> Console:
    """Returns the console for data.

    It is plain and wide if it is not a terminal: a file has no edge to wrap at.
    """
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=_FILE_WIDTH)


def print_json(value: Any) -> None:
    """Prints one JSON document on standard output."""
    print(json.dumps(value, indent=2), flush=True)


@contextmanager
def waiting(console: Console, title: str) -> Iterator[Callable[[str], None]]:
    """Shows a line while something takes long; yields what replaces it.

    Where there is no terminal, lines are printed: each once, at most one in ten seconds.
    """
    if console.is_terminal:
        with console.status(title) as status:
            yield lambda doing: status.update(Text(doing, no_wrap=True, overflow="ellipsis"))
        return
    wording, next_s = {""}, 0.0

    def say(doing: str) -> None:
        nonlocal next_s
        if doing not in wording and time.monotonic() >= next_s:
            wording.add(doing)
            next_s = time.monotonic() + _LINE_EVERY_S
            console.print(Text(doing), soft_wrap=True)

    say(title)
    next_s = 0.0
    yield say


def show_failure(console: Console, failure: ServiceFailedError) -> None:
    """Shows a service that did not start or ended, with its last log lines."""
    console.print(Text(str(failure), style="red"), soft_wrap=True)


def show_error(console: Console, error: RyzansteinError) -> None:
    """Shows one sentence that says what is wrong, with the reason in parentheses.

    Then it shows what the sentence leaves out: further fields, what is missing, and when to retry.
    """
    console.print(Text.assemble(("error: ", "bold red"), clean(f"{_sentence(error)} ({_reason(error)})")), soft_wrap=True)
    for violation in error.violations:
        if not error.message.startswith(f"{violation.field}: "):
            field, why = clean(violation.field), clean(violation.description)
            console.print(Text.assemble("  field ", (field, "bold"), f": {why}"), soft_wrap=True)
    if error.resource is not None and error.resource[1] not in error.message:
        console.print(Text(clean(f"  {error.resource[0]}: {error.resource[1]}")), soft_wrap=True)
    if error.retry_after_s is not None:
        console.print(Text(f"  try again in {error.retry_after_s:g} s"))
    if (
        error.reason in ("", Code.UNAVAILABLE.name) and error.code is Code.UNAVAILABLE
    ):  # not from one of our services: none answered
        console.print(Text(f"  {_hint(error.message)}"))


def _hint(message: str) -> str:
    """Returns what to look at where no service answered. `message` is gRPC's."""
    if "Tls handshake failed" in message:
        return "it speaks no TLS, or its certificate is for another name or not of a CA in the file of --ca"
    if "Socket closed" in message:
        return "does it speak TLS? --ca names the CA of a router, --tls-dir the certificates for other services"
    return "is the cluster running? `ryzanstein up` starts one"


def _sentence(error: RyzansteinError) -> str:
    """Returns the message, with a wrong field as its subject.

    For example `sampling.temperature must be in [0, 2], got 3`.
    """
    for violation in error.violations:
        if error.message.startswith(f"{violation.field}: "):
            return error.message.replace(": ", " ", 1)
    return error.message


def _reason(error: RyzansteinError) -> str:
    return error.code.name if error.reason in ("", error.code.name) else f"{error.code.name}, {error.reason}"


def milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.0f} ms"


def binary_bytes(count: int) -> str:
    return f"{count / 2**20:.0f} MiB" if count < 2**30 else f"{count / 2**30:.1f} GiB"
