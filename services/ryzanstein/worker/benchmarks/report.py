"""How a benchmark ends: a JSON document for scripts or tables for people, or a refusal with exit code 1."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from ryzanstein.errors import RyzansteinError


def publish(document: Mapping[str, Any], tables: Sequence[Table], json_path: str) -> None:
    """The document to the file `json_path`, or to standard output for "-"; without a path the tables, to standard output."""
    text = json.dumps(document, indent=2)
    if json_path == "-":
        print(text)
    elif json_path:
        Path(json_path).write_text(text + "\n")
    else:
        for table in tables:
            Console().print(table)


@contextmanager
def refusals_as_exit() -> Iterator[Console]:
    """Gives the console for what is said meanwhile, on standard error. A RyzansteinError is printed there, with exit code 1."""
    people = Console(stderr=True, highlight=False)
    try:
        yield people
    except RyzansteinError as error:
        people.print(f"error {error.code.name} ({error.reason}): {error.message}", markup=False, soft_wrap=True)
        raise typer.Exit(1) from error
