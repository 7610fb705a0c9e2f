"""A file of records, one line of JSON each, for appending only.

The file is opened for each line, so that a file that was renamed is followed by a new one. Nothing
here renames or removes it.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import stat
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import structlog

from ryzanstein.auth.audit.audit_record import AuditRecord, AuditUnwrittenError
from ryzanstein.files.private_files import private_folder

log = structlog.get_logger(__name__)

_LOCK_S, _LOCK_AGAIN_S = 1.0, 0.02


class AuditFile:
    """The file at a path, created with mode 0600. Several processes may append to one file.

    `fixed` is on every line: which service writes it.
    """

    def __init__(self, path: Path, fixed: Mapping[str, str]) -> None:
        self._path, self._fixed = path, fixed
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="audit-file")

    async def write(self, record: AuditRecord) -> None:
        line = json.dumps({"audit": True, **self._fixed, **record.fields()}).encode() + b"\n"
        await self._run(line)

    async def check(self) -> None:
        """Creates the file and its folder if they are missing. Raises as `write` does."""
        await self._run(b"")

    async def _run(self, line: bytes) -> None:
        try:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._append, line)
        except OSError as error:
            raise AuditUnwrittenError(f"{self._path}: {error.strerror or error}") from error

    def _append(self, line: bytes) -> None:
        """Appends a line, or nothing."""
        if not line:
            private_folder(self._path.parent)
        # Without O_NONBLOCK a pipe that nobody reads would hold the thread for ever.
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
        file = os.open(self._path, flags, 0o600)
        try:
            if not stat.S_ISREG(os.fstat(file).st_mode):
                raise OSError("not a regular file")
            self._lock(file)
            whole = os.fstat(file).st_size
            try:
                self._write(file, line)
                os.fsync(file)
            except OSError:
                os.ftruncate(file, whole)
                raise
        finally:
            os.close(file)

    def _lock(self, file: int) -> None:
        """Keeps other writers away until the file is closed: one that takes its part back must not take theirs."""
        deadline = time.monotonic() + _LOCK_S
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(_LOCK_AGAIN_S)

    def _write(self, file: int, line: bytes) -> None:
        while line:
            line = line[os.write(file, line) :]


async def audit_files(path: Path | None, fixed: Mapping[str, str]) -> list[AuditFile]:
    """Returns the audit file of a service, if it has one.

    One that cannot be written is logged, and stops no start: a full disk refuses acts, not inference.
    """
    if path is None:
        return []
    file = AuditFile(path, fixed)
    try:
        await file.check()
    except AuditUnwrittenError as error:
        log.error("audit file cannot be written, acts are refused", error=str(error))
    return [file]
