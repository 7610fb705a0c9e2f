"""Encodes texts so that neither the agent's loop nor the ranks stand still meanwhile.

A short text is encoded at once: that takes less time than handing it over costs others. Long ones
wait for one of a few threads of low priority, so that any number of them leaves most cores to the
ranks.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

from ryzanstein.process.allotment import whole_cores
from ryzanstein.worker.text.control import LONG_CHARS

_Text = TypeVar("_Text")
_NICENESS = 5
_CORES_PER_THREAD = 4


def _yield_to_ranks() -> None:
    with suppress(OSError, AttributeError):  # priorities of single threads are Linux's
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)


_threads = ThreadPoolExecutor(max(1, whole_cores() // _CORES_PER_THREAD), "tokenize", _yield_to_ranks)


async def encoded(encode: Callable[[_Text], list[int]], text: _Text, num_chars: int) -> list[int]:
    """Returns `encode(text)`, a text of so many characters. Cancelled while it waits for a thread, it is not begun."""
    if num_chars <= LONG_CHARS:
        return encode(text)
    return await asyncio.get_running_loop().run_in_executor(_threads, encode, text)
