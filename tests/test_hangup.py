"""SIGHUP sets every event that was passed, and ends no process that wants to know of it."""

from __future__ import annotations

import asyncio
import os
import signal
import threading

from ryzanstein.process.hangup import hangups


async def test_every_event_is_set_and_afterwards_the_signal_is_as_before() -> None:
    before = signal.getsignal(signal.SIGHUP)
    one, other = asyncio.Event(), asyncio.Event()
    with hangups(one, other):
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGHUP)
            async with asyncio.timeout(5):
                await asyncio.gather(one.wait(), other.wait())
            one.clear()
            other.clear()
    assert signal.getsignal(signal.SIGHUP) == before == signal.SIG_DFL


def test_outside_the_main_thread_nothing_happens() -> None:
    ended = []

    async def run() -> None:
        with hangups(asyncio.Event()):
            ended.append(True)

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    thread.join()
    assert ended == [True]
