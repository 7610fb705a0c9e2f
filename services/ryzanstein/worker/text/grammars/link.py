"""The agent's end of the socket to its grammar process: requests go out, each answer finds its asker."""

from __future__ import annotations

import array
import asyncio
import os
import socket
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count

import msgspec
import structlog

from ryzanstein import errors
from ryzanstein.worker.text.grammars.frames import MAX_PACKET_BYTES, Answer, JudgeReady, Request, packed

log = structlog.get_logger(__name__)

Answered = tuple[Answer, int]
"""An answer, and the descriptor of the file that came with it, or -1. Whoever gets it closes it."""
_decoder = msgspec.msgpack.Decoder(Answer)


class GrammarLink:
    """A link that outlives processes. What is asked while none is ready waits for the next one."""

    def __init__(self) -> None:
        self._jobs = count(1)
        self._answers: dict[int, asyncio.Future[Answered]] = {}
        self._wanted = asyncio.Event()
        self._unsent: deque[bytes] = deque()
        self._ready: socket.socket | None = None

    async def wanted(self) -> None:
        """Returns when something is to be sent."""
        await self._wanted.wait()

    @contextmanager
    def over(self, ours: socket.socket) -> Iterator[None]:
        """Uses a socket to a new process. At the end, what was asked of it fails with UNAVAILABLE."""
        loop = asyncio.get_running_loop()
        loop.add_reader(ours.fileno(), self._read, ours)
        try:
            yield
        finally:
            loop.remove_reader(ours.fileno())
            self._lose()
            ours.close()

    def asked(self, make: Callable[[int], Request]) -> asyncio.Future[Answered]:
        """Sends the request that `make` makes for a new job. Returns what its answer will be."""
        job = next(self._jobs)
        answer: asyncio.Future[Answered] = asyncio.get_running_loop().create_future()
        self._answers[job] = answer
        answer.add_done_callback(lambda _: self._answers.pop(job, None))
        self.post(make(job))
        return answer

    def post(self, request: Request) -> None:
        """Sends a request when the process is ready for it."""
        self._unsent.append(packed(request))
        self._wanted.set()
        self._flush()

    def _flush(self) -> None:
        """Sends what waits, as far as there is room. What the process has not read is sent after its next answer."""
        while self._unsent and self._ready is not None:
            try:
                self._ready.send(self._unsent[0])
            except BlockingIOError:
                return
            except OSError:
                return  # it has ended: whoever runs it will see that
            self._unsent.popleft()

    def _read(self, ours: socket.socket) -> None:
        """Takes what the process has sent: whole packets, a few at a time."""
        for _ in range(16):
            try:
                packet, ancillary, _, _ = ours.recvmsg(MAX_PACKET_BYTES, socket.CMSG_SPACE(4), socket.MSG_CMSG_CLOEXEC)
            except (BlockingIOError, ConnectionError):
                return
            if not packet:
                asyncio.get_running_loop().remove_reader(ours.fileno())
                return
            self._take(_decoder.decode(packet), _descriptor(ancillary), ours)

    def _take(self, answer: Answer, fd: int, ours: socket.socket) -> None:
        if isinstance(answer, JudgeReady):
            log.info("grammar process ready")
            self._ready = ours
        else:
            future = self._answers.get(answer.job)
            if future is not None and not future.done():
                future.set_result((answer, fd))
            elif fd >= 0:
                os.close(fd)
        self._flush()

    def _lose(self) -> None:
        self._ready = None
        self._wanted.clear()
        self._unsent.clear()
        for future in list(self._answers.values()):
            if not future.done():
                future.set_exception(errors.unavailable("NODE_NOT_READY", "the node's grammar process has ended"))


def _descriptor(ancillary: list[tuple[int, int, bytes]]) -> int:
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            return array.array("i", data[:4])[0]
    return -1
