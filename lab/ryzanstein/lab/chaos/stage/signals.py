"""Signals to processes of the cluster: stop and continue, kill."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress

import psutil


def send(pid: int, number: int) -> None:
    """Sends a signal. Does nothing if the process has ended."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)


@asynccontextmanager
async def stopped(pids: Iterable[int]) -> AsyncIterator[None]:
    """Stops the processes while in the context."""
    pids = list(pids)
    for pid in pids:
        send(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            send(pid, signal.SIGCONT)


def family(pid: int) -> list[int]:
    """Returns a process and all that it started."""
    try:
        process = psutil.Process(pid)
        return [pid, *(child.pid for child in process.children(recursive=True))]
    except psutil.NoSuchProcess:
        return [pid]
