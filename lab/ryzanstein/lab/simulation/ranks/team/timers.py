"""Timers of simulated processes: in their own context, and all cancelled with their process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import Context
from typing import Any

_MANY = 64


class Timers:
    """Callbacks of one process or group of processes."""

    def __init__(self, context: Context) -> None:
        self._loop = asyncio.get_running_loop()
        self._context = context
        self._handles: list[asyncio.TimerHandle] = []
        self._step: asyncio.TimerHandle | None = None
        self._over = False

    def step(self, delay_s: float, call: Callable[[], None]) -> None:
        """Schedules the next of many callbacks that follow one another."""
        if not self._over:
            self._step = self._loop.call_later(delay_s, call, context=self._context)

    def later(self, delay_s: float, call: Callable[..., None], *args: Any) -> None:
        """Schedules a call, unless `cancel` was or is called before."""
        if self._over:
            return
        if len(self._handles) >= _MANY:
            now = self._loop.time()
            self._handles = [handle for handle in self._handles if handle.when() >= now]
        self._handles.append(self._loop.call_later(delay_s, call, *args, context=self._context))

    def cancel(self) -> None:
        """Cancels all timers, permanently."""
        self._over = True
        for handle in (*self._handles, self._step):
            if handle is not None:
                handle.cancel()
        self._handles, self._step = [], None
