"""Reads JSON files of a model directory: bounded in size and depth, never blocking.

Anybody may have written these files. This module does not interpret their content. It raises
UnreadableFile, whose message does not name the path; the caller adds it.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

MAX_JSON_BYTES = 64 * 2**20
"""The size limit of a file that describes a model.

The largest known one is the index of a mixture of experts, 9 MB.
"""


MAX_POINTER_BYTES = 64
"""So much of a file tells whether it is a pointer."""
_POINTER = b"version https://git-lfs.github.com/spec/"
_AGAIN = "download it again"


class UnreadableFile(Exception):
    """What is wrong with a file, without its name."""


@contextmanager
def open_regular(path: Path) -> Iterator[BinaryIO]:
    """Opens a regular file, or a link to one.

    Refuses a pipe, a device or a directory at once instead of blocking on it.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except PermissionError as error:
        raise UnreadableFile(f"{error.strerror} for user {os.geteuid()}") from error
    except OSError as error:
        raise UnreadableFile(error.strerror) from error
    except ValueError as error:
        raise UnreadableFile("invalid file name") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise UnreadableFile("not a regular file")
    with open(descriptor, "rb") as file:
        yield file


def read_bytes(path: Path, most: int = MAX_JSON_BYTES) -> bytes:
    """Returns the whole file. Raises UnreadableFile when it has more than `most` bytes."""
    with open_regular(path) as file:
        try:
            content = file.read(most + 1)
        except OSError as error:
            raise UnreadableFile(error.strerror) from error
    if len(content) > most:
        raise UnreadableFile(f"has more than {most} bytes")
    if not content:
        raise UnreadableFile(f"the file is empty: {_AGAIN}")
    refuse_pointer(content)
    return content


def refuse_pointer(content: bytes) -> None:
    """Raises UnreadableFile for a file of which Git LFS has left only a pointer. `content` is its beginning."""
    if content.startswith(_POINTER):
        raise UnreadableFile(f"a pointer of Git LFS, not the file itself: fetch it with `git lfs pull`, or {_AGAIN}")


def parse_value(content: bytes | str) -> Any:
    """Returns what a JSON text contains."""
    try:
        return json.loads(content)
    except RecursionError:
        raise UnreadableFile("not readable as JSON: nested too deeply") from None
    except ValueError as error:
        raise UnreadableFile(f"not valid JSON: {error}") from error


def parse_object(content: bytes | str) -> dict[str, Any]:
    """Returns the object that a JSON text contains."""
    value = parse_value(content)
    if not isinstance(value, dict):
        raise UnreadableFile(f"must be an object, got {type(value).__name__}")
    return value


def read_object(path: Path) -> dict[str, Any]:
    """Returns the object that a JSON file contains."""
    return parse_object(read_bytes(path))
