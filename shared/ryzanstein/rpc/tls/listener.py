"""Accepts connections with TLS: bounds how many are in their handshake, for how long, and how many begin at once.

A connection is a bare socket until its first byte has arrived, and what begins with another byte than
a handshake gets an answer without TLS. The application's protocol sees a connection after its handshake.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

import structlog

from ryzanstein.rpc.tls.handshake_counts import HandshakeCounts

log = structlog.get_logger(__name__)

_HANDSHAKE = 0x16  # the type of a TLS record
# In one turn of the loop, which serves requests between two of them: a handshake takes about a millisecond.
_STARTS, _ACCEPTS = 4, 32
_TURN_S = 0.001
_MAX_WAITING = 128
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_PAUSE_S, _NO_DESCRIPTOR_S = 0.02, 1.0


@dataclass(frozen=True, slots=True)
class HandshakeBounds:
    """Of one server: connections whose handshake is not complete, and the seconds that each may take from its accept.

    Where there is no room for another, one ends earlier that said nothing for `silent_s`, or else one
    that takes more than `fair_s`.
    """

    max_open: int = 1024
    timeout_s: float = 10.0
    silent_s: float = 0.1
    fair_s: float = 1.0


@dataclass(frozen=True, slots=True)
class Handshakes:
    """How a port makes handshakes: with the context as it is at each one, and within bounds."""

    context: Callable[[], ssl.SSLContext]
    metrics: HandshakeCounts | None = None
    bounds: HandshakeBounds = field(default_factory=HandshakeBounds)
    closing_s: float = 5.0
    """For a client to read what was written, and to say that it saw the end of the connection."""


@dataclass(eq=False, slots=True)
class _Half:
    """A connection whose handshake is not complete. `task` runs it; from `begun` on the socket belongs to its transport."""

    sock: socket.socket
    since: float
    task: asyncio.Task[None] | None = None
    begun: bool = False


class TlsListener:
    """Listens as `asyncio.Server` does, of which it has the part that is used here.

    `plain_answer` is sent to clients that do not speak TLS.
    Where there is no room for one more, the connection ends that has been silent longest, or else the
    handshake that takes longest: an honest client speaks at once, and takes a few round trips. If none
    has had its time, new ones wait in the kernel's queue.
    """

    def __init__(
        self,
        listener: socket.socket,
        tls: Handshakes,
        new_protocol: Callable[[], asyncio.Protocol],
        plain_answer: bytes = b"",
    ) -> None:
        self._listener, self._new_protocol, self._plain_answer = listener, new_protocol, plain_answer
        self._context, self._bounds, self._metrics = tls.context, tls.bounds, tls.metrics
        self._closing_s = tls.closing_s
        self._loop = asyncio.get_running_loop()
        # Each in the order of their accept: those that said nothing, those that wait for their turn, those that began.
        self._silent: dict[_Half, None] = {}
        self._waiting: deque[_Half] = deque()
        self._begun: dict[_Half, None] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._accepting = False
        if tls.metrics is not None:
            tls.metrics.watch(lambda: self._num_open)

    def start(self, backlog: int) -> None:
        """Accepts from now on."""
        self._listener.setblocking(False)
        self._listener.listen(backlog)
        self._accept_on()
        self._drop_late()

    def close(self) -> None:
        """Accepts no more, and ends the handshakes that are not complete."""
        self._accept_off()
        for half in (*self._silent, *self._waiting, *self._begun):
            self._drop(half, "stopped")
        self._waiting.clear()
        for timer in self._timers.values():
            timer.cancel()

    async def wait_closed(self) -> None:
        """Returns at once: what was accepted belongs to the application by now."""

    @property
    def _num_open(self) -> int:
        return len(self._silent) + len(self._waiting) + len(self._begun)

    def _accept_on(self) -> None:
        if not self._accepting:
            self._accepting = True
            self._loop.add_reader(self._listener, self._accept)

    def _accept_off(self) -> None:
        if self._accepting:
            self._accepting = False
            self._loop.remove_reader(self._listener)

    def _pause(self, time_s: float = _PAUSE_S) -> None:
        """Leaves new connections to the kernel for a moment: it refuses none before its own queue is full."""
        self._accept_off()
        self._timers["accept"] = self._loop.call_later(time_s, self._accept_on)

    def _accept(self) -> None:
        for _ in range(_ACCEPTS):
            if not self._has_room():
                self._pause()
                return
            try:
                sock, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _NO_ROOM:
                    raise
                if not self._make_room():
                    log.warning("connections cannot be accepted", error=error.strerror)
                    self._pause(_NO_DESCRIPTOR_S)
                return
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            half = _Half(sock, self._loop.time())
            self._silent[half] = None
            self._loop.add_reader(sock, self._on_first_byte, half)
            self._on_first_byte(half)  # most have spoken by now

    def _has_room(self) -> bool:
        if len(self._waiting) >= _MAX_WAITING:
            return False
        return self._num_open < self._bounds.max_open or self._make_room()

    def _make_room(self) -> bool:
        """Ends a connection whose handshake is not complete. Returns False if none has had its time."""
        now = self._loop.time()
        for halves, time_s in ((self._silent, self._bounds.silent_s), (self._begun, self._bounds.fair_s)):
            half = next(iter(halves), None)
            if half is not None and half.since + time_s < now:
                self._drop(half, "evicted")
                return True
        return False

    def _drop_late(self) -> None:
        """Ends the handshakes whose time is over; the oldest are the first."""
        late = self._loop.time() - self._bounds.timeout_s
        for halves in (self._silent, self._begun):
            for half in list(halves):
                if half.since > late:
                    break
                self._drop(half, "timeout")
        self._timers["late"] = self._loop.call_later(self._bounds.timeout_s / 20, self._drop_late)

    def _on_first_byte(self, half: _Half) -> None:
        try:
            first = half.sock.recv(1, socket.MSG_PEEK)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            first = b""
        if not first:
            self._failed(half, ConnectionResetError())
            self._close(half)
        elif first[0] != _HANDSHAKE:
            self._answer_plainly(half)
        else:
            self._loop.remove_reader(half.sock)
            del self._silent[half]
            self._waiting.append(half)
            if len(self._waiting) == 1:
                self._loop.call_soon(self._begin_some)

    def _answer_plainly(self, half: _Half) -> None:
        with suppress(OSError):
            half.sock.recv(65_536)  # what is left unread would make the kernel drop the answer
            half.sock.send(self._plain_answer)
            half.sock.shutdown(socket.SHUT_WR)
        self._drop(half, "plaintext")

    def _begin_some(self) -> None:
        for _ in range(min(_STARTS, len(self._waiting))):
            half = self._waiting.popleft()
            self._begun[half] = None
            half.task = self._loop.create_task(self._shake(half))
        if self._waiting:
            # Not in the next iteration, which would come before what has arrived is read.
            self._timers["begin"] = self._loop.call_later(_TURN_S, self._begin_some)

    async def _shake(self, half: _Half) -> None:
        half.begun = True
        try:
            await self._loop.connect_accepted_socket(
                self._new_protocol, half.sock, ssl=self._context(), ssl_shutdown_timeout=self._closing_s
            )
        except OSError as error:  # also what OpenSSL says
            self._failed(half, error)
            log.debug("handshake failed", error=getattr(error, "reason", None) or str(error) or type(error).__name__)
        except Exception as error:
            self._failed(half, error)
            log.exception("handshake failed")
        else:
            self._ended(half, "done")

    def _ended(self, half: _Half, outcome: str) -> None:
        self._leave(half)
        if self._metrics is not None:
            self._metrics.ended(outcome)

    def _failed(self, half: _Half, error: Exception) -> None:
        self._leave(half)
        if self._metrics is not None:
            self._metrics.failed(error)

    def _leave(self, half: _Half) -> None:
        self._silent.pop(half, None)
        self._begun.pop(half, None)

    def _drop(self, half: _Half, outcome: str) -> None:
        """Ends a handshake and closes its connection."""
        self._ended(half, outcome)
        self._close(half)

    def _close(self, half: _Half) -> None:
        if half.task is not None:
            half.task.cancel()
        if not half.begun:  # else its transport closes it
            self._loop.remove_reader(half.sock)
            half.sock.close()
