"""What a rank's interpreter writes of itself: the stack of a crash, and where a thread is when it is asked.

Both go to a file without a name that the agent and the rank share, so that they outlive the rank. The
handlers of `faulthandler` need no lock of the interpreter: a thread that is in C, and holds the
interpreter, answers too. A thread that is asked describes itself alone: to walk the stacks of threads
that run would crash the rank now and then (CPython's issues 116008 and 131580).
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import os
import re
import signal

ASK = signal.SIGUSR2
"""Asks a thread of a rank for its stack."""
MAX_BYTES = 2**16
_FATAL = "Fatal Python error: "
_FRAME = re.compile(r'^(?:Current thread|Stack).*?\n  File "([^"]*)", line (\d+) in (.+)$', re.MULTILINE)


def make() -> int:
    """Returns a descriptor of the file. OSError: there is no memory."""
    fd = os.memfd_create("last-words")
    # Both sides share the offset too. Appending, the rank writes at the end wherever the agent has cut the file.
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_APPEND)
    return fd


def ignore_questions() -> None:
    """Makes this process, and what is forked from it, survive a question before it can answer. Called by the fork server."""
    signal.signal(ASK, signal.SIG_IGN)


def keep(fd: int) -> None:
    """Writes the stacks of this process there from now on. Called by the rank, which keeps the descriptor open.

    A crash shows all threads: one that dies anyway has nothing to lose.
    """
    faulthandler.enable(file=fd)
    faulthandler.register(ASK, file=fd, all_threads=False)


def summary(words: str) -> str:
    """Returns the last words of a crash in one line, such as "Segmentation fault in forward (runner.py, line 88)".

    Empty without a crash.
    """
    if not words.startswith(_FATAL):
        return ""
    fault = words.removeprefix(_FATAL).partition("\n")[0]
    frame = _FRAME.search(words)
    return f"{fault} in {frame[3]} ({os.path.basename(frame[1])}, line {frame[2]})" if frame else fault


class LastWords:
    """The agent's side of the file of one rank. The descriptor belongs to it."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._kept = ""

    def read(self) -> str:
        """Returns what is written there; after `close`, what was written then."""
        if self._fd < 0:
            return self._kept
        return os.pread(self._fd, MAX_BYTES, 0).decode(errors="replace")

    @property
    def crash(self) -> str:
        """Returns the stacks of a crash; empty without one. They come after an answer that the crash has cut short."""
        words = self.read()
        return words[words.index(_FATAL) :] if _FATAL in words else ""

    def clear(self) -> None:
        """Drops an answer that has been read. The words of a crash stay."""
        if self._fd >= 0 and _FATAL not in self.read():
            os.ftruncate(self._fd, 0)

    def close(self) -> None:
        """Releases the descriptor. What is written there can still be read."""
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                self._kept = self.read()
            os.close(self._fd)
            self._fd = -1
