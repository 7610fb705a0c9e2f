"""How a benchmark ends: a JSON document for scripts or tables for people, or exit code 1."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from ryzanstein.errors import RyzansteinError


def publish(document: Mapping[str, Any], tables: Sequence[Table], json_path: str) -> None:
    """Writes the document to the file `json_path`, or to standard output for "-".

    Without a path it prints the tables to standard output.
    """
    text = json.dumps(document, indent=2)
    if json_path == "-":
        print(text)
    elif json_path:
        _replace(Path(json_path), text + "\n")
    else:
        for table in tables:
            Console().print(table)


def _replace(path: Path, text: str) -> None:
    """Writes to a temporary file and renames it. A device or a pipe is written directly.

    So a reader never sees half a document, and a full disk does not destroy an older one.
    """
    if path.exists() and not path.is_file():
        path.write_text(text)
        return
    target = path.resolve()
    target.parent.mkdir(parents=True, exist_ok=True)
    alongside = target.with_name(f".{target.name}.{os.getpid()}.new")
    alongside.write_text(text)
    os.replace(alongside, target)


@contextmanager
def refusals_as_exit() -> Iterator[Console]:
    """Yields the console for messages on standard error.

    A RyzansteinError is printed there, with exit code 1.
    """
    people = Console(stderr=True, highlight=False)
    try:
        yield people
    except RyzansteinError as error:
        people.print(f"error {error.code.name} ({error.reason}): {error.message}", markup=False, soft_wrap=True)
        raise typer.Exit(1) from error
