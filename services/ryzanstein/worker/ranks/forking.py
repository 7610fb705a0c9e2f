"""The agent's side of a fork server: ranks created in milliseconds, and how they and it end."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import partial

import msgspec
import structlog

from ryzanstein.worker.ranks import lifesign
from ryzanstein.worker.ranks.fork_server import PACKET_BYTES, ForkRank, RankEnded, RankForked, ServerFailed, ServerMessage
from ryzanstein.worker.ranks.lifesign import LifeSign
from ryzanstein.worker.ranks.messages import RankSpec
from ryzanstein.worker.ranks.process import RankProcess, WatchedProcess, end, exit_text
from ryzanstein.worker.ranks.wiring import Wiring

log = structlog.get_logger(__name__)

RANK_COMMAND = (sys.executable, "-m", "ryzanstein.worker.ranks.rank")
_WORD_S = 0.02


class ForkServerLost(Exception):
    """The fork server can fork no more ranks, and its ranks end with it. The message says why."""


class ForkServer:
    """A fork server, started when created, in the caller's thread and in a session of its own.

    A terminal's Ctrl-C is handled by the agent alone. Where Linux groups processes by session to
    share the processor among them, the agent does not share with its ranks.

    The server dies with the agent, and its ranks die with it. `lost` resolves to why it has ended,
    also after `close`. The command is a program that calls `fork_server.main`; it gets `--parent`
    (a process id, see `lifeline`), `--fd` and `--nice`.
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
        except OSError:
            self._socket.close()
            raise
        finally:
            theirs.close()
        self._ranks: dict[int, RankProcess] = {}
        self._forked: asyncio.Future[RankProcess] = loop.create_future()
        self._life_sign: LifeSign | None = None
        self._last_words = ""
        self._warned = False
        self._server = WatchedProcess(self._child.pid, os.pidfd_open(self._child.pid))
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

    def wire(self, spec: RankSpec) -> Wiring:
        """Returns the descriptors of a group of ranks that is to be forked."""
        return Wiring(spec)

    async def fork(self, rank: int, fds: Sequence[int]) -> RankProcess:
        """Returns a new rank that has these descriptors under the same numbers.

        The first of them is its channel to the agent; it has no others but its sign of life. Waits
        for the server to be ready; one call at a time. A caller that stops waiting must close the
        server. Raises ForkServerLost.
        """
        self._forked = asyncio.get_running_loop().create_future()
        if not self.lost.done():
            life_sign = lifesign.make()
            self._life_sign = LifeSign(life_sign)
            given = [*fds, life_sign]
            try:
                socket.send_fds(self._socket, [msgspec.msgpack.encode(ForkRank(rank, given))], given)
            except ConnectionError:
                await asyncio.wait([self.lost])
            finally:
                os.close(life_sign)
        await asyncio.wait((self._forked, self.lost), return_when=asyncio.FIRST_COMPLETED)
        if not self._forked.done():
            raise ForkServerLost(self.lost.result())
        return self._forked.result()

    async def close(self) -> None:
        """Kills the server; the kernel kills its ranks."""
        await end([self._server], 0.0)

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
                self._on_forked(forked, fds[0])
            case RankEnded(pid, code):
                self._ranks.pop(pid).ended(code)
            case ServerFailed(message):
                self._last_words = message
        return True

    def _on_forked(self, forked: RankForked, pidfd: int) -> None:
        assert self._life_sign is not None, "one rank is forked for one wish"
        process = self._ranks[forked.pid] = RankProcess(forked.rank, forked.pid, pidfd, self._life_sign)
        process.over.add_done_callback(partial(self._on_rank_over, process))
        if forked.threads > 1 and not self._warned:
            self._warned = True
            log.warning("fork server has threads", threads=forked.threads)
        if not self._forked.done():
            self._forked.set_result(process)

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
        said = f"failed: {self._last_words}" if self._last_words else exit_text(code)
        self.lost.set_result(f"the fork server {said}")
        for process in [process for process in self._ranks.values() if process.over.done()]:
            self._without_word(process)
        self._server.ended(code)
