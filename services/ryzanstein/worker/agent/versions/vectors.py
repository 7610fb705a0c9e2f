"""The inputs whose vectors are being computed on this node, from submit to the vector.

Like `RunningGenerations` it knows no ranks: messages to the engine go through `send`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ryzanstein.errors import Code, RyzansteinError
from ryzanstein.worker.engine.messages import CancelGroup, GroupFailed, StepEvents, SubmitGroup


class RunningVectors:
    """The groups that are `waiting` for their vectors, by number. `idle` is set while there are none."""

    def __init__(self, send: Callable[[SubmitGroup | CancelGroup], None]) -> None:
        self._send = send
        self.waiting: dict[int, asyncio.Future[bytes]] = {}
        self.idle = asyncio.Event()
        self.idle.set()

    async def vector(self, group: SubmitGroup) -> bytes:
        """Returns the group's vector, as numbers in single precision. Cancelled: the engine drops the group.

        Raises the error with which the group failed.
        """
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self.waiting[group.group] = future
        self.idle.clear()
        try:
            self._send(group)
            return await future
        except asyncio.CancelledError:
            self._send(CancelGroup(group.group))
            raise
        finally:
            del self.waiting[group.group]
            if not self.waiting:
                self.idle.set()

    def on_step(self, events: StepEvents) -> None:
        """Hands over one step's vectors and failures."""
        for group, vector in events.vectors:
            if (future := self.waiting.get(group)) is not None and not future.done():
                future.set_result(vector)
        for failed in events.failed:
            if (future := self.waiting.get(failed.group)) is not None and not future.done():
                future.set_exception(error_of(failed))

    def fail_all(self, error: RyzansteinError) -> None:
        """Fails everything because the ranks are gone."""
        for future in self.waiting.values():
            if not future.done():
                future.set_exception(error)


def error_of(failed: GroupFailed) -> RyzansteinError:
    """Returns the error with which a group ended."""
    return RyzansteinError(
        failed.message, Code(failed.code), failed.reason, failed.metadata, retry_after_s=failed.retry_after_s
    )
