"""What takes the engine's place on a scripted node: a step every so often, a token of every running answer each step.

As a real engine it never waits for whoever takes the tokens. Its pace is that of the newest answer.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from ryzanstein.router.benchmarks.script import Script, stamp


class TokenSink(Protocol):
    """Takes one answer's tokens. Must not block."""

    def token(self, index: int, token_id: int, last: bool) -> None: ...


class ScriptedEngine:
    """Runs answers from `begin` to their last token, or to `cancel`."""

    def __init__(self) -> None:
        self.steps = 0
        self._loop = asyncio.get_running_loop()
        self._running: dict[TokenSink, Script] = {}
        self._next_index: dict[TokenSink, int] = {}
        self._step_s = 0.0
        self._stepping = False

    @property
    def running(self) -> int:
        return len(self._running)

    def begin(self, sink: TokenSink, script: Script) -> None:
        self._running[sink] = script
        self._next_index[sink] = 0
        self._step_s = script.step_s
        if not self._stepping:
            self._stepping = True
            self._loop.call_soon(self._step)

    def cancel(self, sink: TokenSink) -> None:
        if self._running.pop(sink, None) is not None:
            del self._next_index[sink]

    def _step(self) -> None:
        self._stepping = bool(self._running)
        if not self._stepping:
            return
        self._loop.call_later(self._step_s, self._step)
        self.steps += 1
        now = stamp()
        for sink, script in list(self._running.items()):
            index = self._next_index[sink]
            self._next_index[sink] = index + 1
            last = index + 1 == script.tokens
            if last:
                self.cancel(sink)
            sink.token(index, now, last)
