"""Where the keys are that a command works on: a file, or Redis."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Protocol

import typer

from ryzanstein.auth.keys.keys_file import KeysFile
from ryzanstein.auth.keys.records import KeyRecord, KeySnapshot
from ryzanstein.cli.programs import require

if TYPE_CHECKING:
    from ryzanstein.auth.keys.redis_keys import RedisKeys

FILE_VARIABLE, REDIS_VARIABLE = "RYZANSTEIN_KEYS_FILE", "RYZANSTEIN_REDIS_URL"

File = Annotated[
    Path | None,
    typer.Option(show_default=FILE_VARIABLE, help="File of the keys; `add` creates it."),
]
RedisUrl = Annotated[
    str | None,
    typer.Option(
        show_default=f"{REDIS_VARIABLE}, where {FILE_VARIABLE} is not set",
        help="Redis server of the keys; other users can read a password in the command line.",
    ),
]
RedisPrefix = Annotated[str, typer.Option(envvar="RYZANSTEIN_REDIS_PREFIX", help="Prefix of every key of Redis.")]


class PlaceError(Exception):
    """The place of the keys cannot be used."""


class KeyPlace(Protocol):
    """Where keys are kept."""

    def read(self) -> KeySnapshot: ...

    def add(self, record: KeyRecord) -> None: ...

    def revoke(self, key_id: str, at: float) -> bool: ...


@dataclass(frozen=True, slots=True)
class GivenPlace:
    """The place that options name, or else the environment."""

    file: Path | None
    redis_url: str | None
    redis_prefix: str

    @contextmanager
    def opened(self) -> Iterator[KeyPlace]:
        """Yields the place. Raises BadParameter if none is given, or two are."""
        file, url = self.file, self.redis_url
        if file is not None and url is not None:
            raise typer.BadParameter("--file and --redis-url cannot both be given")
        if file is None and url is None:
            named, url = os.environ.get(FILE_VARIABLE, ""), os.environ.get(REDIS_VARIABLE, "")
            file = Path(named) if named else None
        if file is not None:
            yield KeysFile(file)
        elif url:
            with redis_keys(url, self.redis_prefix) as keys:
                yield keys
        else:
            raise typer.BadParameter(f"give the file of the keys with --file, or set {FILE_VARIABLE}")


@contextmanager
def redis_keys(url: str, prefix: str) -> Iterator[RedisKeys]:
    """Yields the keys of a Redis server. Raises PlaceError where they cannot be read or written."""
    require("keys", "redis")
    from ryzanstein.auth.keys.redis_keys import KeysRedisError, RedisKeys

    try:
        with closing(RedisKeys(url, prefix)) as keys:
            yield keys
    except KeysRedisError as error:
        raise PlaceError(str(error)) from None
