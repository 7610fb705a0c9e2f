"""Asks the threads of a rank for their stacks, one after the other. A rank that hangs in C answers too."""

from __future__ import annotations

import asyncio
import ctypes
from dataclasses import replace

from ryzanstein.observe.threads import NOT_RUNNING, handles_signal
from ryzanstein.worker.ranks.health.last_words import ASK, LastWords
from ryzanstein.worker.supervision.stacks import ProcessStacks, ThreadStack

_ANSWER_S = 0.05
_LOOK_S = 0.0005
_LOOKS_WITHOUT_FRAMES = 4
_libc = ctypes.CDLL(None)


async def asked(seen: ProcessStacks, words: LastWords) -> ProcessStacks:
    """Returns the same threads with their stacks. The process is a rank that has not been reaped.

    One call at a time for each rank. Cancelled: what has been asked may still answer, which harms nothing.
    """
    return replace(seen, threads=[await _asked(seen.pid, thread, words) for thread in seen.threads])


async def _asked(pid: int, thread: ThreadStack, words: LastWords) -> ThreadStack:
    """Returns the thread with its stack; without one if it does not run or has no Python frames."""
    if thread.state in NOT_RUNNING or words.crash:
        return thread
    words.clear()
    if _libc.tgkill(pid, thread.tid, ASK) != 0:
        return thread
    stack = await _answer(pid, thread.tid, words)
    words.clear()
    return replace(thread, stack=stack)


async def _answer(pid: int, tid: int, words: LastWords) -> str:
    """Waits until the thread has left the handler. It is in there as long as the kernel blocks the signal for it."""
    loop = asyncio.get_running_loop()
    until, empty = loop.time() + _ANSWER_S, 0
    while loop.time() < until and empty < _LOOKS_WITHOUT_FRAMES:
        await asyncio.sleep(_LOOK_S)
        try:
            if handles_signal(pid, tid, ASK):
                continue
        except OSError:
            break
        if text := words.read():
            return _frames(text)
        empty += 1
    return _frames(words.read())


def _frames(text: str) -> str:
    """Returns the frames of an answer, without what faulthandler says before them."""
    return "\n".join(line.strip() for line in text.splitlines() if line.startswith("  "))
