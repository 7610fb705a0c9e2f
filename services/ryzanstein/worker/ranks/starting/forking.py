"""The agent's side of a fork server: ranks created in milliseconds, and how they and it end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec
import structlog

from ryzanstein.worker.ranks.health import last_words, lifesign
from ryzanstein.worker.ranks.health.last_words import LastWords
from ryzanstein.worker.ranks.health.lifesign import LifeSign
from ryzanstein.worker.ranks.messages import RankSpec
from ryzanstein.worker.ranks.starting.fork_server import (
    PACKET_BYTES,
    ForkRank,
    RankEnded,
    RankForked,
    RankNotForked,
    ServerFailed,
    ServerMessage,
)
from ryzanstein.worker.ranks.starting.kernel_build import have_kernels
from ryzanstein.worker.ranks.starting.process import RankProcess, WatchedProcess, end, exit_text, watched
from ryzanstein.worker.ranks.starting.wiring import Wiring

log = structlog.get_logger(__name__)

RANK_COMMAND = (sys.executable, "-P", "-m", "ryzanstein.worker.ranks.rank")
_WORD_S = 0.02


class ForkServerLost(Exception):
    """The fork server can fork no more ranks, and its ranks end with it. The message says why."""


class ForkFailed(Exception):
    """One rank could not be forked; the other ranks of the server go on. The message says why."""


@dataclass(frozen=True, slots=True)
class _ForkCall:
    """A request that the server has not answered yet."""

    life_sign: LifeSign
    last_words: LastWords
    answer: asyncio.Future[RankProcess]


class ForkServer:
    """A fork server, started when created, in the caller's thread and in a session of its own.

    A terminal's Ctrl-C is handled by the agent alone. Where Linux groups processes by session to
    share the processor among them, the agent does not share with its ranks.

    The server dies with the agent, and its ranks die with it. `lost` resolves to why it has ended,
    also after `close`. The command is a program that calls `fork_server.main`; it gets `--parent`
    (a process id, see `lifeline`), `--fd` and `--nice`.

    Several groups may take their ranks from one server, see `shared_server`.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str], nice: int = 0) -> None:
        loop = asyncio.get_running_loop()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._child = subprocess.Popen(
                (*command, "--parent", str(os.getpid()), "--fd", str(theirs.fileno()), "--nice", str(nice)),
                pass_fds=(theirs.fileno(),),
                env={**os.environ, **env},
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
            self._server = WatchedProcess(self._child.pid, watched(self._child))
        except OSError:
            self._socket.close()
            raise
        finally:
            theirs.close()
        self._ranks: dict[int, RankProcess] = {}
        self._turn = asyncio.Lock()
        self._call: _ForkCall | None = None
        self._last_words = ""
        self._warned = False
        self._server.over.add_done_callback(self._on_over)
        self.lost: asyncio.Future[str] = loop.create_future()
        self._socket.setblocking(False)
        loop.add_reader(self._socket.fileno(), self._read)

    async def __aenter__(self) -> ForkServer:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def pid(self) -> int:
        return self._server.pid

    async def prepare(self, spec: RankSpec, compiling: Callable[[], None]) -> None:
        """See `source.RankServer`. The server imports meanwhile."""
        await have_kernels(spec, compiling)

    def wire(self, spec: RankSpec) -> Wiring:
        """Returns the descriptors of a group of ranks that is to be forked."""
        return Wiring(spec)

    async def fork(self, rank: int, fds: Sequence[int]) -> RankProcess:
        """Returns a new rank that has these descriptors under the same numbers.

        The first of them is its channel to the agent; it has no others but the file of its last words
        and its sign of life. Waits for the server to be ready, and for earlier calls. Cancelled: the rank is killed as soon as
        the server has forked it, and the server goes on. Raises ForkServerLost or ForkFailed.
        """
        async with self._turn:
            await self._earlier_call()
            answer = self._request(rank, fds)
            try:
                await asyncio.wait((answer, self.lost), return_when=asyncio.FIRST_COMPLETED)
            except asyncio.CancelledError:
                answer.add_done_callback(_end_stray)
                raise
        if not answer.done():
            raise ForkServerLost(self.lost.result())
        return answer.result()

    async def close(self) -> None:
        """Kills the server; the kernel kills its ranks."""
        await end([self._server], 0.0)

    async def discard(self) -> None:
        """See `source.RankServer`. This server has one user."""
        await self.close()

    async def _earlier_call(self) -> None:
        """Waits for the answer to a cancelled call: the server has one request at a time.

        So a server that stands still is not sent more and more descriptors.
        """
        if self._call is not None:
            await asyncio.wait((self._call.answer, self.lost), return_when=asyncio.FIRST_COMPLETED)

    def _request(self, rank: int, fds: Sequence[int]) -> asyncio.Future[RankProcess]:
        """Asks the server for a rank; returns the future of its answer. Raises ForkFailed."""
        answer: asyncio.Future[RankProcess] = asyncio.get_running_loop().create_future()
        if self.lost.done():
            return answer
        try:
            words, life_sign = _instruments()
        except OSError as error:
            raise ForkFailed(str(error)) from None
        given = [*fds, words, life_sign]
        try:
            call = _ForkCall(LifeSign(life_sign), LastWords(words), answer)
            with contextlib.suppress(ConnectionError):  # it has ended: `lost` says why in a moment
                socket.send_fds(self._socket, [msgspec.msgpack.encode(ForkRank(rank, given))], given)
            self._call = call
        except OSError as error:
            os.close(words)
            raise ForkFailed(str(error)) from None
        finally:
            os.close(life_sign)
        return answer

    def _read(self) -> bool:
        """Reads one message. Returns False if there is none."""
        try:
            data, fds, _, _ = socket.recv_fds(self._socket, PACKET_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return False
        except ConnectionResetError:  # it ended before it read everything; what it sent is still there
            return True
        if not data:
            asyncio.get_running_loop().remove_reader(self._socket.fileno())
            return False
        match msgspec.msgpack.decode(data, type=ServerMessage):
            case RankForked() as forked:
                self._on_forked(forked, fds)
            case RankNotForked(message):
                call = self._answered()
                call.last_words.close()
                call.answer.set_exception(ForkFailed(message))
            case RankEnded(pid, code):
                if (process := self._ranks.pop(pid, None)) is not None:
                    process.ended(code)
            case ServerFailed(message):
                self._last_words = message
        return True

    def _on_forked(self, forked: RankForked, pidfds: Sequence[int]) -> None:
        call = self._answered()
        if not pidfds:  # lost on the way: this process has no room for one
            os.kill(forked.pid, signal.SIGKILL)  # the server has not reaped it
            call.last_words.close()
            call.answer.set_exception(ForkFailed("too many descriptors are open to watch it"))
            return
        (pidfd,) = pidfds
        process = self._ranks[forked.pid] = RankProcess(forked.rank, forked.pid, pidfd, call.life_sign, call.last_words)
        process.over.add_done_callback(partial(self._on_rank_over, process))
        if forked.threads > 1 and not self._warned:
            self._warned = True
            log.warning("fork server has threads", threads=forked.threads)
        call.answer.set_result(process)

    def _answered(self) -> _ForkCall:
        call, self._call = self._call, None
        assert call is not None, "every answer belongs to a request"
        return call

    def _on_rank_over(self, process: RankProcess, _: object) -> None:
        """Waits briefly: the server, the rank's parent, reports at once how the rank ended."""
        asyncio.get_running_loop().call_later(_WORD_S, self._without_word, process)

    def _without_word(self, process: RankProcess) -> None:
        """Finds how a rank ended without its server.

        The server is stopped, or busy, or has ended and taken the rank with it.
        """
        code = process.find_code()
        if code is None and self.lost.done():
            code = -signal.SIGKILL
        if code is not None:
            process.ended(code)

    def _on_over(self, _: object) -> None:
        while self._read():
            pass
        asyncio.get_running_loop().remove_reader(self._socket.fileno())
        self._socket.close()
        code = self._child.wait()
        if self._call is not None:
            self._call.last_words.close()
        text = f"failed: {self._last_words}" if self._last_words else exit_text(code)
        self.lost.set_result(f"the fork server {text}")
        for process in [process for process in self._ranks.values() if process.over.done()]:
            self._without_word(process)
        self._server.ended(code)


def _instruments() -> tuple[int, int]:
    """Returns the descriptors of a rank's last words and of its sign of life. Raises OSError."""
    words = last_words.make()
    try:
        return words, lifesign.make()
    except OSError:
        os.close(words)
        raise


def _end_stray(answer: asyncio.Future[RankProcess]) -> None:
    """Kills a rank whose caller no longer waits for it. It has loaded nothing yet."""
    if answer.exception() is None:
        answer.result().send_signal(signal.SIGKILL)
