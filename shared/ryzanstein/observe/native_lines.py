"""Turns lines that libraries write directly to standard error into records of the JSON log.

C-core, torch's profiler, faulthandler and the C library do not use a logger: they write lines to
descriptor 2. `divert` gives the log its own descriptor and replaces descriptor 2 with a pipe, also
for child processes. Standard output is replaced too if it is the same file; otherwise it belongs to
the caller of this process. A small process that imports little (`main`) reads the pipe, so that the
output of a crash is read too, and no writer waits for an interpreter. It is nobody's child process
and ends when the last writer has ended. The pipe never blocks: what does not fit is lost.
"""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from ryzanstein.observe.log_files import LineWriter, LogFile, Rotation, timestamp
from ryzanstein.observe.lost_lines import LineLoss, LostLines

LINES_PER_S = 100
MAX_CHARS = 4096
_PIPE_BYTES = 2**20
_MAX_LINE_BYTES = 2**18
_NO_ROTATION = Rotation()
_PROGRAM = "import sys; sys.path.append(sys.argv[1]); from ryzanstein.observe.native_lines import main; main(*sys.argv[2:])"
_LEVELS = {"E": "error", "F": "critical", "I": "info", "W": "warning"}  # of absl and glog: "E0000 00:00:...", "I1122 21:56:..."


def divert(fields: Mapping[str, str | int], lost: LostLines, rotation: Rotation = _NO_ROTATION) -> LineWriter:
    """Replaces descriptor 2 and returns the real standard error, for the log.

    `fields` are in each record of a library's line. `lost` counts lines that are lost. `rotation`: see
    `LogFile`. Raises OSError, in which case nothing has changed.
    """
    real = os.dup(2)
    source, pipe = os.pipe()
    try:
        fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        os.set_blocking(pipe, False)
        folder = str(Path(__file__).absolute().parents[2])
        arguments = [folder, json.dumps(fields), json.dumps(rotation), str(lost.fd)]
        command = [sys.executable, "-I", "-S", "-c", _PROGRAM, *arguments]
        # It forks and detaches: code that counts or kills this process's children must not find it.
        subprocess.run(command, stdin=source, stdout=real, stderr=real, pass_fds=(lost.fd,), check=True)
        if os.path.sameopenfile(1, 2):
            os.dup2(pipe, 1)
        os.dup2(pipe, 2)
    except (OSError, subprocess.SubprocessError) as error:
        os.close(real)
        raise OSError(f"cannot capture library output: {error}") from error
    finally:
        os.close(source)
        os.close(pipe)
    return LineWriter(LogFile(real, rotation).write, fields, lost.counter(LineLoss.UNWRITTEN))


class Lines:
    """A splitter of data into whole lines. A line that is too long is truncated."""

    def __init__(self, take: Callable[[bytes], None]) -> None:
        self._take = take
        self._begun = b""

    def feed(self, data: bytes) -> None:
        *lines, rest = data.split(b"\n")
        for line in lines:
            self._add(line)
            self.end()
        self._add(rest)

    def end(self) -> None:
        """Ends the current line."""
        line, self._begun = self._begun, b""
        if line.strip():
            self._take(line)

    def _add(self, piece: bytes) -> None:
        self._begun += piece[: _MAX_LINE_BYTES - len(self._begun)]


class Records:
    """A writer of lines as JSON records.

    A line that is a record is written unchanged. Other lines are wrapped, up to a rate limit; `on_dropped` is
    called for each one over it.
    """

    def __init__(
        self,
        fields: Mapping[str, str | int],
        write: Callable[[bytes], object],
        on_dropped: Callable[[], None] = lambda: None,
    ) -> None:
        self._fields, self._write, self._on_dropped = fields, write, on_dropped
        self._second = 0
        self._written = self._dropped = 0

    def take(self, line: bytes) -> None:
        if _is_record(line):
            self._write(line + b"\n")
        elif self._may_write():
            self._wrap(line.decode(errors="backslashreplace"))

    def _may_write(self) -> bool:
        second = int(time.monotonic())
        if second != self._second:
            dropped, self._second, self._written, self._dropped = self._dropped, second, 0, 0
            if dropped:
                self._wrap(f"{dropped} lines dropped in the previous second")
        self._written += 1
        if self._written <= LINES_PER_S:
            return True
        self._dropped += 1
        self._on_dropped()
        return False

    def _wrap(self, text: str) -> None:
        level = _LEVELS.get(text[0], "warning") if text[1:5].isdigit() else "warning"
        record = {
            **self._fields,
            "event": text.rstrip()[:MAX_CHARS],
            "level": level,
            "logger": "native",
            "timestamp": timestamp(),
        }
        self._write(json.dumps(record).encode() + b"\n")


def _is_record(line: bytes) -> bool:
    try:
        return line.startswith(b"{") and isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def main(fields: str, rotation: str, lost_fd: str) -> None:
    """Reads standard input to its end, in a process without a parent. The arguments are JSON."""
    known, lost = json.loads(fields), LostLines(int(lost_fd))
    # Before the service writes: the file may have another name after its first lines.
    log_file = LogFile(1, Rotation(*json.loads(rotation)))
    if os.fork():
        os._exit(0)
    os.setsid()
    writer = LineWriter(log_file.write, {**known, "logger": "native"}, lost.counter(LineLoss.NATIVE_UNWRITTEN))
    records = Records(known, writer.put, lost.counter(LineLoss.NATIVE_LIMITED))
    lines = Lines(records.take)
    while data := os.read(0, 2**16):
        lines.feed(data)
    lines.end()
