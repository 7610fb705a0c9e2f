"""What a console needs after a restart: who was logged in, and which answers ran. Private files, each small.

Nobody gets in by them: of cookies and keys they have digests alone. What cannot be written is logged, and a restart then knows
less.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import msgspec
import structlog

from ryzanstein.console.wire import ToolResult
from ryzanstein.files.private_files import opener, private_folder

log = structlog.get_logger(__name__)

_LOGINS = "logins.json"
_ANSWERS = "answers"
_MOST_BYTES = 2**20
_Note = TypeVar("_Note")


class LoginNote(msgspec.Struct, frozen=True):
    """A login: the digest of the person's key, and when they last did something, in Unix seconds."""

    person: str
    used_at: float


class AnswerNote(msgspec.Struct, frozen=True):
    """An answer that runs, and its question: a text, or results of tools.

    `generation_id` is empty until a node has accepted the question.
    """

    person: str
    session: str
    text: str
    results: tuple[ToolResult, ...] = ()
    generation_id: str = ""


class RestartNotes:
    """The files of one console. Without a folder nothing is kept."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def logins(self) -> dict[str, LoginNote]:
        """Returns the logins that were written, by the digests of their cookies."""
        return self._read(_LOGINS, dict[str, LoginNote]) or {}

    def write_logins(self, logins: Mapping[str, LoginNote]) -> None:
        self._write(_LOGINS, logins)

    def answers(self, person: str) -> dict[str, AnswerNote]:
        """Returns the answers of a person that ran, by their ids, the oldest first."""
        if self._folder is None:
            return {}
        files = [each for each in (self._folder / _ANSWERS).glob("*.json") if each.is_file()]
        files.sort(key=lambda each: each.stat().st_mtime_ns)
        found = {each.stem: self._read(f"{_ANSWERS}/{each.name}", AnswerNote) for each in files}
        return {name: note for name, note in found.items() if note is not None and note.person == person}

    def write_answer(self, answer_id: str, note: AnswerNote) -> None:
        self._write(f"{_ANSWERS}/{answer_id}.json", note)

    def forget_answer(self, answer_id: str) -> None:
        if self._folder is not None:
            with suppress(OSError):
                (self._folder / _ANSWERS / f"{answer_id}.json").unlink()

    def _read(self, name: str, kind: type[_Note]) -> _Note | None:
        """Returns what a file says; None: there is none, or it is damaged."""
        if self._folder is None:
            return None
        try:
            with (self._folder / name).open("rb") as file:
                return msgspec.json.decode(file.read(_MOST_BYTES), type=kind)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, msgspec.DecodeError) as error:
            log.warning("note unusable", file=name, error=str(error)[:200])
            return None

    def _write(self, name: str, note: object) -> None:
        """Replaces a file as a whole: a process that is killed leaves the old one or the new one."""
        if self._folder is None:
            return
        path = self._folder / name
        new = path.with_suffix(".new")
        try:
            private_folder(path.parent)
            with open(new, "wb", opener=opener) as file:
                file.write(msgspec.json.encode(note))
            os.replace(new, path)
        except OSError as error:
            log.warning("note not written", file=name, error=error.strerror)
