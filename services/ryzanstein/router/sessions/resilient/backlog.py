"""Writes that the store could not take yet, in order.

Each may be applied twice, because it is unknown whether a failed write was done. A write that fails
unexpectedly is retried like any other. It is given up after that has happened three times while the
store did everything else: a write that can never succeed must not block the others forever.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import structlog

from ryzanstein.errors import Code, RyzansteinError
from ryzanstein.router.sessions.store import (
    SessionStore,
    StoreUnavailableError,
    UnexpectedStoreError,
    store_unavailable,
    unexpected,
)
from ryzanstein.router.telemetry import RouterTelemetry

log = structlog.get_logger(__name__)

# Nothing waits for the backlog, so a store that is merely slow may take this long.
_WRITE_TIMEOUT_S = 5.0
_MAX_BLAMES = 3


@dataclass(frozen=True, slots=True)
class Write:
    """A queued write.

    `done_by`: the error that means that it was done before or has become pointless.
    """

    session_id: str
    chars: int
    done_by: Code
    apply: Callable[[SessionStore], Awaitable[object]]
    generation_id: str = ""


class Backlog:
    """A queue of writes. Only `full` bounds it: what was already generated is always accepted."""

    def __init__(self, max_writes: int, max_chars: int, telemetry: RouterTelemetry) -> None:
        self._max_writes = max_writes
        self._max_chars = max_chars
        self._telemetry = telemetry
        self._writes: deque[Write] = deque()
        self._sessions: Counter[str] = Counter()
        self._generations: set[str] = set()
        self._chars = 0
        self._blames = 0

    def __len__(self) -> int:
        return len(self._writes)

    @property
    def full(self) -> bool:
        """Whether no new turn may begin, because there would be no room for its answer."""
        return len(self._writes) >= self._max_writes or self._chars >= self._max_chars

    def touches(self, session_id: str) -> bool:
        return self._sessions[session_id] > 0

    def has_turn(self, generation_id: str) -> bool:
        return generation_id in self._generations

    def add(self, write: Write) -> None:
        self._writes.append(write)
        self._sessions[write.session_id] += 1
        self._generations.update({write.generation_id} - {""})
        self._chars += write.chars
        self._telemetry.store_backlog.set(len(self._writes))

    async def flush(self, store: SessionStore) -> None:
        """Applies writes until the queue is empty, including writes that are added meanwhile.

        On StoreUnavailableError the rest stays queued. On UnexpectedStoreError the first of the
        rest may be at fault, see `blame_first`.
        """
        while self._writes:
            await self._apply(self._writes[0], store)
            self._pop()

    def blame_first(self, error: UnexpectedStoreError) -> None:
        """Records that the store does everything but the first write.

        The third time, that write is given up.
        """
        self._blames += 1
        if self._blames >= _MAX_BLAMES:
            self.give_up_first(error)

    def give_up_first(self, error: UnexpectedStoreError) -> None:
        self._lost("unwritable", self._writes[0], error)
        self._pop()

    async def _apply(self, write: Write, store: SessionStore) -> None:
        try:
            async with asyncio.timeout(_WRITE_TIMEOUT_S):
                await write.apply(store)
        except TimeoutError:
            raise store_unavailable(f"a write took longer than {_WRITE_TIMEOUT_S:g} s") from None
        except StoreUnavailableError:
            raise
        except RyzansteinError as error:
            if error.code is not write.done_by:
                self._lost("refused", write, error)
            elif write.generation_id and error.code is Code.NOT_FOUND:
                self._lost("session_gone", write, error)
        except Exception as error:
            raise unexpected(error) from error

    def _lost(self, cause: str, write: Write, error: Exception) -> None:
        self._telemetry.store_lost_writes.labels(cause).inc()
        log.error("session write lost", session_id=write.session_id, cause=cause, error=str(error))

    def _pop(self) -> None:
        write = self._writes.popleft()
        self._blames = 0
        self._chars -= write.chars
        self._generations.discard(write.generation_id)
        self._sessions[write.session_id] -= 1
        if not self._sessions[write.session_id]:
            del self._sessions[write.session_id]
        self._telemetry.store_backlog.set(len(self._writes))
