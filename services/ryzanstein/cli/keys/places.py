"""Where the keys are that a command works on: a file, or Redis."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Protocol

import typer

from ryzanstein.auth.keys.keys_file import KeysFile
from ryzanstein.auth.keys.records import KeyRecord, KeySnapshot

File = Annotated[
    Path | None, typer.Option(envvar="RYZANSTEIN_KEYS_FILE", help="File of the keys; `add` creates it.", show_default=False)
]


class KeyPlace(Protocol):
    """Where keys are kept."""

    def read(self) -> KeySnapshot: ...

    def add(self, record: KeyRecord) -> None: ...

    def revoke(self, key_id: str, at: float) -> bool: ...


@contextmanager
def opened(file: Path | None) -> Iterator[KeyPlace]:
    """Yields the place of the keys. Raises BadParameter if none is given."""
    if file is None:
        raise typer.BadParameter("give the file of the keys with --file, or set RYZANSTEIN_KEYS_FILE")
    yield KeysFile(file)
