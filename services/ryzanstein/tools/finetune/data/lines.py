"""The JSON objects of a data file, one a line or one list of all, with their numbers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from ryzanstein.tools.finetune.refusal import DataRefused
from ryzanstein.worker.json_files import UnreadableFile, open_regular
from ryzanstein.worker.refusal import excerpt

MAX_LINE_BYTES = 2**24
"""An example of this size has four million tokens, a hundred times what is trained on at once."""
MAX_LIST_BYTES = 2**30
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Record:
    """An object of the file, or what is wrong with its line. `number` is from 1."""

    number: int
    value: dict[str, Any]
    fault: str = ""


def read_records(file: Path) -> tuple[str, Iterator[Record]]:
    """Returns what the file consists of, `line` or `entry`, and its objects in order. Empty lines are left out.

    Raises DataRefused if it is no regular file of UTF-8; OSError.
    """
    try:
        with open_regular(file) as opened:
            begin = opened.read(4096).removeprefix(_BOM).lstrip()
    except UnreadableFile as error:
        raise DataRefused(f"{file}: {error}") from error
    return ("entry", _of_list(file)) if begin.startswith(b"[") else ("line", _of_lines(file))


def _of_lines(file: Path) -> Iterator[Record]:
    with open_regular(file) as opened:
        number = 0
        while line := opened.readline(MAX_LINE_BYTES + 1):
            number += 1
            if len(line) > MAX_LINE_BYTES:
                yield Record(number, {}, f"is longer than {MAX_LINE_BYTES} bytes")
                _skip_line(opened, line)
                continue
            line = line.removeprefix(_BOM) if number == 1 else line
            if line.strip():
                yield _record(number, line)


def _skip_line(opened: BinaryIO, line: bytes) -> None:
    while line and not line.endswith(b"\n"):
        line = opened.readline(MAX_LINE_BYTES)


def _record(number: int, line: bytes) -> Record:
    try:
        value = _parsed(line)
    except UnicodeDecodeError as error:
        return Record(number, {}, f"is not UTF-8: byte {error.start + 1} is 0x{error.object[error.start]:02x}")
    except (ValueError, RecursionError) as error:
        return Record(number, {}, f"is not JSON: {error}")
    return _of_value(number, value)


def _of_value(number: int, value: object) -> Record:
    if not isinstance(value, dict):
        return Record(number, {}, f"must be a JSON object, got {excerpt(value)}")
    return Record(number, value)


def _of_list(file: Path) -> Iterator[Record]:
    with open_regular(file) as opened:
        text = opened.read(MAX_LIST_BYTES + 1)
    if len(text) > MAX_LIST_BYTES:
        raise DataRefused(f"{file}: a list of more than {MAX_LIST_BYTES} bytes: write one object a line")
    try:
        values = _parsed(text.removeprefix(_BOM))
    except (ValueError, RecursionError) as error:
        raise DataRefused(f"{file}: begins with [ and is not a JSON list: {error}") from error
    for number, value in enumerate(values, start=1):
        yield _of_value(number, value)


def _parsed(text: bytes) -> Any:
    return json.loads(text.decode("utf-8"), parse_constant=_no_number, object_pairs_hook=_without_repeats)


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {excerpt(next(name for name in names if names.count(name) > 1))} is there twice")
    return found
