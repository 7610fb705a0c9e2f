"""Keys of a file, which is compared as often as the watch looks.

Its content is compared, not its name: Kubernetes changes a Secret by turning a link. A large file is
read again only when its stamp has changed, or may not show a change yet.
"""

from __future__ import annotations

import asyncio
import time
from hashlib import sha256
from pathlib import Path

import structlog

from ryzanstein.auth.keys.keys_file import KeysFile, KeysFileError
from ryzanstein.auth.keys.keys_text import KeysText
from ryzanstein.auth.keys.records import KeySnapshot
from ryzanstein.router.access.stores.source import FoundKeys, KeysUnreadableError

log = structlog.get_logger(__name__)

_ALWAYS_READ_BYTES = 2**20
_STAMP_SETTLES_S = 3.0
"""How long after a change another one may have the same stamp, on a file system with coarse times."""


class FileKeys:
    """The keys of a file."""

    name = "file"

    def __init__(self, path: Path) -> None:
        self._file = KeysFile(path)
        self._stamp: tuple[int, ...] = ()
        self._settled = False
        self._digest = b""
        self._known: tuple[KeysText, bytes] | None = None
        """The last good reading, and the digest of what was read."""
        self._fault = ""
        """Why the last content was refused; empty: it was not."""

    async def saved(self) -> FoundKeys | None:
        return None

    async def newer(self) -> KeySnapshot | None:
        return await asyncio.to_thread(self._newer)

    async def close(self) -> None:
        """Does nothing: no file stays open."""

    def _newer(self) -> KeySnapshot | None:
        try:
            content = self._changed_content()
        except KeysFileError as error:
            raise KeysUnreadableError(str(error)) from None
        if content is None and not self._fault:
            return None
        return self._parsed(content)

    def _parsed(self, content: bytes | None) -> KeySnapshot:
        """Returns the keys of a new content. None: it is the one that was refused before."""
        if content is not None:
            self._fault = ""
            try:
                read = self._read(content)
            except KeysFileError as error:
                self._fault = str(error)
            else:
                if read.whole_bytes < len(content):
                    log.warning("keys file ends in a table written in part, which is left out", whole_bytes=read.whole_bytes)
                return read.snapshot
        raise KeysUnreadableError(self._fault)

    def _read(self, content: bytes) -> KeysText:
        """Returns what a content says. Of one that a command appended to, only the end is read: 100,000 keys take seconds."""
        known, digest = self._known or (None, b"")
        if known is not None and sha256(content[: known.whole_bytes]).digest() == digest:
            read = self._file.parsed_after(known, content)
        else:
            read = self._file.parsed(content)
        self._known = read, sha256(content[: read.whole_bytes]).digest()
        return read

    def _changed_content(self) -> bytes | None:
        """Returns the content if it is another one than at the last call."""
        stamp, now = self._file.stamp(), time.time()
        if self._settled and stamp == self._stamp and self._digest:
            return None
        content = self._file.content()
        self._stamp = stamp
        self._settled = len(content) > _ALWAYS_READ_BYTES and abs(now - stamp[4] / 1e9) > _STAMP_SETTLES_S
        digest = sha256(content).digest()
        if digest == self._digest:
            return None
        self._digest = digest
        return content
