"""A copy of the keys on disk, for a router that starts while Redis is away. It has digests, and no secret."""

from __future__ import annotations

import os
import time
from pathlib import Path

import structlog

from ryzanstein.auth.keys.keys_file import KeysFile, KeysFileError
from ryzanstein.auth.keys.keys_text import keys_text
from ryzanstein.auth.keys.records import KeySnapshot
from ryzanstein.files.private_files import opener, private_folder
from ryzanstein.router.access.stores.source import FoundKeys

log = structlog.get_logger(__name__)

_CONFIRM_S = 10.0


class SavedKeys:
    """The copy at a path, a keys file. When it was last seen to be current is the file's time.

    A copy that cannot be written is logged: it is only an aid.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.name = path.name
        self._is_current = False
        self._confirmed_at = 0.0

    def exists(self) -> bool:
        return self._path.exists()

    def load(self) -> FoundKeys | None:
        """Returns the keys of the copy; None if there is none that can be read."""
        try:
            snapshot, read_at = KeysFile(self._path).read(), self._path.stat().st_mtime
        except (KeysFileError, OSError) as error:
            if self.exists():
                log.warning("saved keys not readable", error=str(error))
            return None
        return FoundKeys(snapshot, max(0.0, time.time() - read_at))

    def save(self, snapshot: KeySnapshot) -> None:
        """Replaces the copy, so that a reader never sees half of one."""
        self._is_current = False
        alongside = self._path.with_suffix(".new")
        try:
            private_folder(self._path.parent)
            alongside.unlink(missing_ok=True)
            with open(alongside, "w", encoding="utf-8", opener=opener) as file:
                file.writelines(keys_text(snapshot))
                file.flush()
                os.fsync(file.fileno())
            os.replace(alongside, self._path)
            self._is_current = True
        except OSError as error:
            log.warning("keys not saved", path=str(self._path), error=str(error))

    def confirm(self) -> None:
        """Notes, now and then, that the copy is still current. Does nothing if it could not be written."""
        if self._is_current and (now := time.monotonic()) - self._confirmed_at >= _CONFIRM_S:
            self._confirmed_at = now
            try:
                os.utime(self._path)
            except OSError as error:
                log.debug("saved keys not confirmed", error=str(error))
