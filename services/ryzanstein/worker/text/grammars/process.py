"""The agent's side of its grammar process: starts it with the first constraint, asks, remembers verdicts.

Verdicts and tables of tokens are kept while the model is the node's. When the process ends, what
was asked is answered with UNAVAILABLE: another node may be tried, or the same one again.
"""

from __future__ import annotations

import array
import asyncio
import mmap
import os
import signal
import socket
import subprocess
import sys
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from itertools import count

import msgspec
import structlog

from ryzanstein import errors
from ryzanstein.constraints import Constraint
from ryzanstein.errors import RyzansteinError
from ryzanstein.worker.constraints.refusal import Cause
from ryzanstein.worker.ranks.process import WatchedProcess, end, exit_text
from ryzanstein.worker.text.grammars.frames import (
    MAX_PACKET_BYTES,
    Answer,
    Close,
    Ended,
    Judge,
    Open,
    Opened,
    Ready,
    Refused,
    Request,
    Sound,
    Unreadable,
    packed,
)
from ryzanstein.worker.text.grammars.judge import Verdict, refused
from ryzanstein.worker.text.tokenizer import TextModel

log = structlog.get_logger(__name__)

_COMMAND = (sys.executable, "-m", "ryzanstein.worker.text.grammars.program")
_OPEN_S = 120.0
_PATIENCE = 15
"""Seconds of waiting per second of computing; the forks end themselves before."""
_MAX_VERDICTS = 1024
_MAX_VERDICT_CHARS = 8 * 2**20
_AT_ONCE = 2
_MAX_MODELS = 8
_TIME, _MEMORY = (Cause.TIME, "takes too long to compile"), (Cause.MEMORY, "takes too much memory to compile")
# What a fork that ended without an answer says of its constraint: it used up its processor time, or its address space.
# Other ends say nothing of it. A machine that is busy or short of memory ends forks too.
_OWN_FAULT = {-signal.SIGPROF: _TIME, -signal.SIGXCPU: _TIME, -signal.SIGABRT: _MEMORY, -signal.SIGSEGV: _MEMORY}
_decoder = msgspec.msgpack.Decoder(Answer)


class GrammarProcessLost(Exception):
    """The process has ended, or does not answer. The message says how."""


@dataclass(frozen=True, slots=True)
class GrammarBounds:
    """The bounds of one constraint (processor seconds, bytes of memory) and of all (how many wait)."""

    cpu_s: float
    memory_bytes: int
    max_waiting: int


@dataclass(frozen=True, slots=True)
class GrammarObserver:
    """Is told of compiles (seconds), of refusals (cause), and whether a verdict was known."""

    compiled: Callable[[float], None]
    refused: Callable[[Cause], None]
    looked_up: Callable[[bool], None]


class _Verdicts:
    """The verdicts of one model, the least recently used of which are forgotten."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Constraint, Verdict | RyzansteinError] = OrderedDict()
        self._chars = 0

    def get(self, constraint: Constraint) -> Verdict | RyzansteinError | None:
        if (verdict := self._kept.get(constraint)) is not None:
            self._kept.move_to_end(constraint)
        return verdict

    def add(self, constraint: Constraint, verdict: Verdict | RyzansteinError) -> None:
        if constraint not in self._kept:
            self._chars += len(constraint.text)
        self._kept[constraint] = verdict
        while len(self._kept) > _MAX_VERDICTS or self._chars > _MAX_VERDICT_CHARS:
            self._chars -= len(self._kept.popitem(last=False)[0].text)


@dataclass(slots=True)
class _Model:
    """A model that the process has open. `text` is compared by identity: a new version is opened anew."""

    text: TextModel
    path: str
    table: asyncio.Future[bytes]
    verdicts: _Verdicts


class GrammarProcess:
    """A `ConstraintJudge` whose process `run` keeps running, from the first constraint on."""

    def __init__(self, bounds: GrammarBounds, observer: GrammarObserver) -> None:
        self._bounds, self._observer = bounds, observer
        self._jobs = count(1)
        self._answers: dict[int, asyncio.Future[tuple[Answer, int]]] = {}
        self._models: dict[str, _Model] = {}
        self._places = asyncio.Semaphore(_AT_ONCE)
        self._num_waiting = 0
        self._wanted = asyncio.Event()
        self._unsent: deque[bytes] = deque()
        self._agent: socket.socket | None = None
        self.able = find_spec("llguidance") is not None

    async def judge(self, constraint: Constraint, model: TextModel) -> Verdict:
        opened = await self._opened(model)
        known = opened.verdicts.get(constraint)
        self._observer.looked_up(known is not None)
        if known is None:
            known = await self._judged(constraint, opened)
        if isinstance(known, RyzansteinError):
            raise known
        return known

    async def tokens(self, model: TextModel) -> bytes:
        return await (await self._opened(model)).table

    async def run(self) -> None:
        """Runs a process from the first constraint on, until cancelled.

        Raises GrammarProcessLost when it ended. Start it again then, after a pause if that happens
        often.
        """
        await self._wanted.wait()
        ours, popen = self._program()
        process = WatchedProcess(popen.pid, os.pidfd_open(popen.pid))
        process.over.add_done_callback(lambda _: process.ended(popen.wait()))
        loop = asyncio.get_running_loop()
        loop.add_reader(ours.fileno(), self._read, ours)
        try:
            await asyncio.shield(process.over)
            raise GrammarProcessLost(f"grammar process {exit_text(await process.exited)}")
        finally:
            loop.remove_reader(ours.fileno())
            self._lose()
            ours.close()
            await end([process], 0.0)

    async def _opened(self, model: TextModel) -> _Model:
        """Returns the model, open in the process.

        Calls at the same time wait for the same opening, which goes on when they are cancelled.
        """
        known = self._models.get(model.path)
        if known is None or known.text is not model or (known.table.done() and known.table.exception() is not None):
            known = self._open(model)
        try:
            async with asyncio.timeout(_OPEN_S):
                await asyncio.shield(known.table)
        except TimeoutError:
            raise _no_answer() from None
        return known

    def _open(self, model: TextModel) -> _Model:
        loop = asyncio.get_running_loop()
        self._close(model.path)
        known = self._models[model.path] = _Model(model, model.path, loop.create_future(), _Verdicts())
        known.table.add_done_callback(_look)
        job, answer = next(self._jobs), loop.create_future()
        answer.add_done_callback(lambda answer: self._on_opened(job, known, answer))
        self._answers[job] = answer
        self._post(Open(job, model.path, model.name, str(model.template_file or "")))
        return known

    def _on_opened(self, job: int, model: _Model, answer: asyncio.Future[tuple[Answer, int]]) -> None:
        self._answers.pop(job, None)
        try:
            model.table.set_result(_content(*answer.result()))
        except Exception as error:  # whatever it is, those who wait for the table must learn it
            model.table.set_exception(error)

    def _close(self, path: str) -> None:
        """Closes this model if it is open, and the one that was opened first if too many are."""
        paths = [path] if path in self._models else []
        if len(self._models) >= _MAX_MODELS:
            paths = paths or [next(iter(self._models))]
        for each in paths:
            del self._models[each]
            self._post(Close(each))

    async def _judged(self, constraint: Constraint, model: _Model) -> Verdict | RyzansteinError:
        """Returns the verdict of the process, and remembers it."""
        if self._num_waiting >= self._bounds.max_waiting:
            raise errors.queue_full(self._num_waiting, self._bounds.max_waiting)
        self._num_waiting += 1
        try:
            async with self._places:
                if (known := model.verdicts.get(constraint)) is not None:
                    return known  # many ask for one constraint at the same time
                make = partial(Judge, path=model.path, constraint=constraint)
                answer, _ = await self._ask(make, _PATIENCE * self._bounds.cpu_s)
                known = self._verdict(constraint, answer)
                model.verdicts.add(constraint, known)
                return known
        finally:
            self._num_waiting -= 1

    def _verdict(self, constraint: Constraint, answer: Answer) -> Verdict | RyzansteinError:
        match answer:
            case Sound(_, compile_s, grammar_bytes):
                self._observer.compiled(compile_s)
                return Verdict(grammar_bytes)
            case Refused(_, cause, message):
                return self._refused(constraint, Cause(cause), message)
            case Ended(_, code) if code in _OWN_FAULT:
                return self._refused(constraint, *_OWN_FAULT[code])
            case Ended(_, code):
                self._observer.refused(Cause.PROCESS)
                raise errors.unavailable("NODE_NOT_READY", f"the node could not compile the constraint: {_others_fault(code)}")
        raise errors.unavailable("NODE_NOT_READY", "the grammar process gave an unexpected answer")

    def _refused(self, constraint: Constraint, cause: Cause, message: str) -> RyzansteinError:
        self._observer.refused(cause)
        return refused(constraint, message, cause.value)

    async def _ask(self, make: Callable[[int], Request], timeout_s: float) -> tuple[Answer, int]:
        job = next(self._jobs)
        answer: asyncio.Future[tuple[Answer, int]] = asyncio.get_running_loop().create_future()
        self._answers[job] = answer
        self._post(make(job))
        try:
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError:
            raise _no_answer() from None
        finally:
            self._answers.pop(job, None)

    def _post(self, request: Request) -> None:
        """Sends a request when the process is ready for it; starts the process if none runs."""
        self._unsent.append(packed(request))
        self._wanted.set()
        self._flush()

    def _flush(self) -> None:
        """Sends what waits, as far as there is room. What the process has not read is sent after its next answer."""
        while self._unsent and self._agent is not None:
            try:
                self._agent.send(self._unsent[0])
            except BlockingIOError:
                return
            except OSError:
                return  # it has ended: `run` will see that
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
        if isinstance(answer, Ready):
            log.info("grammar process ready")
            self._agent = ours
        else:
            future = self._answers.get(answer.job)
            if future is not None and not future.done():
                future.set_result((answer, fd))
            elif fd >= 0:
                os.close(fd)
        self._flush()

    def _lose(self) -> None:
        """Forgets what the process knew, and fails what was asked of it."""
        self._agent = None
        self._wanted.clear()
        self._unsent.clear()
        self._models.clear()
        for future in list(self._answers.values()):
            if not future.done():
                future.set_exception(errors.unavailable("NODE_NOT_READY", "the node's grammar process has ended"))

    def _program(self) -> tuple[socket.socket, subprocess.Popen[bytes]]:
        """Starts the program in a session of its own. OSError: there are no processes or descriptors left."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        bounds = self._bounds
        arguments = ("--memory-bytes", str(bounds.memory_bytes), "--cpu-s", str(bounds.cpu_s))
        try:
            command = (*_COMMAND, "--parent", str(os.getpid()), "--fd", str(theirs.fileno()), *arguments)
            fds = (theirs.fileno(),)
            # It forks, so it has no threads of libraries.
            env = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
            popen = subprocess.Popen(command, pass_fds=fds, stdin=subprocess.DEVNULL, start_new_session=True, env=env)
            return ours, popen
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()


def _no_answer() -> RyzansteinError:
    return errors.unavailable("NODE_NOT_READY", "the node's grammar process is not responding")


def _descriptor(ancillary: list[tuple[int, int, bytes]]) -> int:
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            return array.array("i", data[:4])[0]
    return -1


def _content(answer: Answer, fd: int) -> bytes:
    """Returns the content of the file that came with an answer, and closes it. Raises UNAVAILABLE."""
    if not isinstance(answer, Opened) or fd < 0:
        reason = answer.message if isinstance(answer, Unreadable) else "an unexpected answer"
        raise errors.unavailable("NODE_NOT_READY", f"the model's tokens cannot be read: {reason}")
    try:
        with mmap.mmap(fd, 0, prot=mmap.PROT_READ) as mapped:
            return bytes(mapped)
    finally:
        os.close(fd)


def _others_fault(code: int) -> str:
    """Returns why a fork ended that was within its own bounds."""
    if code == -signal.SIGALRM:
        return "the machine is too busy"
    return "the machine is short of memory" if code == -signal.SIGKILL else f"the compiler {exit_text(code)}"


def _look(future: asyncio.Future[bytes]) -> None:
    """Looks at an error for which nobody may wait any more."""
    if not future.cancelled():
        future.exception()
