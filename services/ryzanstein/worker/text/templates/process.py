"""The agent's side of its template process: starts it, sends it jobs, kills it if a template hangs.

One job runs at a time; the others wait their turn, up to a bound. The process holds no state that
is not in the next job. When it ends, the job that was running is sent once more, to the next
process.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import msgspec
import structlog

from ryzanstein import errors
from ryzanstein.generation.prompts import ChatPrompt
from ryzanstein.worker.ranks.process import WatchedProcess, end, exit_text
from ryzanstein.worker.text.templates.frames import LENGTH, MAX_FRAME_BYTES, Answer, Job, Ready, framed
from ryzanstein.worker.text.templates.rendering import Limited, Rendered, RenderLimit, TemplateSource, rendered

log = structlog.get_logger(__name__)

_COMMAND = (sys.executable, "-m", "ryzanstein.worker.text.templates.program")
_START_S = 60.0
_PATIENCE = 10
"""Seconds of waiting per second of computing, because cores are shared."""
_TRIES = 2


class TemplateProcessLost(Exception):
    """The process has ended, or does not answer. The message says how."""


@dataclass(frozen=True, slots=True)
class TemplateBounds:
    """The bounds of one job (processor seconds, bytes of memory) and of all (how many wait)."""

    cpu_s: float
    memory_bytes: int
    max_waiting: int


@dataclass(slots=True)
class _Asked:
    """A job and the future of its answer."""

    template: TemplateSource
    prompt: ChatPrompt | None
    answer: asyncio.Future[Answer]
    tries: int = 0


@dataclass(slots=True)
class _Child:
    """A process that takes jobs. `template` is the one that it knows."""

    process: WatchedProcess
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    template: TemplateSource | None = field(default=None)

    async def ask(self, template: TemplateSource, prompt: ChatPrompt | None) -> Answer:
        """Sends a job and returns the answer. EOFError, ConnectionError: the process has ended."""
        known = template is self.template
        self.template = template
        self.writer.write(framed(Job(None if known else template, prompt)))
        return await self.read()

    async def read(self) -> Answer:
        (length,) = LENGTH.unpack(await self.reader.readexactly(LENGTH.size))
        if length > MAX_FRAME_BYTES:
            raise ConnectionError(f"frame of {length} bytes exceeds the limit of {MAX_FRAME_BYTES} bytes")
        answer: Answer = msgspec.msgpack.decode(await self.reader.readexactly(length), type=Answer)
        return answer

    async def ended(self) -> int:
        """Kills the process if it runs; returns its exit code."""
        self.writer.close()
        await end([self.process], 0.0)
        return self.process.exited.result()


class TemplateProcess:
    """A `ChatRenderer` that renders in a process. `run` keeps the process running.

    Until it runs, and between two processes, jobs wait. `on_limit` is called for each bound that a
    template broke.
    """

    def __init__(self, bounds: TemplateBounds, on_limit: Callable[[RenderLimit], None]) -> None:
        self._bounds = bounds
        self._on_limit = on_limit
        self._waiting: deque[_Asked] = deque()
        self._more = asyncio.Event()

    async def check(self, template: TemplateSource) -> None:
        answer = await self._ask(template, None)
        if not isinstance(answer, Ready):
            rendered(answer)

    async def render(self, template: TemplateSource, prompt: ChatPrompt) -> Rendered:
        answer = await self._ask(template, prompt)
        if isinstance(answer, Ready):
            raise errors.internal("the template process sent an unexpected answer")
        return rendered(answer)

    async def run(self) -> None:
        """Runs a template process until cancelled.

        Raises TemplateProcessLost when the process ended. Start it again then, after a pause if
        that happens often.
        """
        async with self._started() as child:
            log.info("template process ready", pid=child.process.pid)
            while True:
                await self._answer_next(child)

    async def _ask(self, template: TemplateSource, prompt: ChatPrompt | None) -> Answer:
        if len(self._waiting) >= self._bounds.max_waiting:
            raise errors.queue_full(len(self._waiting), self._bounds.max_waiting)
        asked = _Asked(template, prompt, asyncio.get_running_loop().create_future())
        self._waiting.append(asked)
        self._more.set()
        try:
            async with asyncio.timeout(_START_S):
                answer = await asked.answer
        except TimeoutError:
            raise errors.unavailable("NODE_NOT_READY", "the node's template process is not responding") from None
        if isinstance(answer, Limited):
            self._on_limit(answer.limit)
        return answer

    async def _answer_next(self, child: _Child) -> None:
        while not self._waiting:
            self._more.clear()
            await self._more.wait()
        asked = self._waiting[0]
        if not asked.answer.done():  # the caller may have left
            answer = await self._answer(child, asked)
            if not asked.answer.done():
                asked.answer.set_result(answer)
        self._waiting.popleft()

    async def _answer(self, child: _Child, asked: _Asked) -> Answer:
        """Returns the answer to a job.

        Raises TemplateProcessLost when the process ended or was too late. If this was the first end
        over this job, the job stays the next one.
        """
        asked.tries += 1
        try:
            async with asyncio.timeout(_PATIENCE * self._bounds.cpu_s):
                return await child.ask(asked.template, asked.prompt)
        except (TimeoutError, EOFError, ConnectionError) as error:
            late = isinstance(error, TimeoutError)
            code = await child.ended()
            limit = _limit_of(code, asked.tries)
            if limit is not None and not asked.answer.done():
                asked.answer.set_result(Limited(limit))
            ended = "timed out" if late else exit_text(code)
            raise TemplateProcessLost(f"template process {ended}") from error

    @asynccontextmanager
    async def _started(self) -> AsyncIterator[_Child]:
        child = await self._spawn()
        try:
            async with asyncio.timeout(_START_S):
                await child.read()
            yield child
        except (EOFError, ConnectionError, TimeoutError) as error:
            raise TemplateProcessLost(f"template process {exit_text(await child.ended())} during startup") from error
        finally:
            await child.ended()

    async def _spawn(self) -> _Child:
        """Starts a process. OSError: there are no processes or descriptors left."""
        ours, popen = self._program()
        process = WatchedProcess(popen.pid, os.pidfd_open(popen.pid))
        process.over.add_done_callback(lambda _: process.ended(popen.wait()))
        ours.setblocking(False)
        reader, writer = await asyncio.open_connection(sock=ours)
        return _Child(process, reader, writer)

    def _program(self) -> tuple[socket.socket, subprocess.Popen[bytes]]:
        """Starts the program in a session of its own.

        A terminal's Ctrl-C is handled by the agent alone.
        """
        ours, theirs = socket.socketpair()
        fd, bounds = str(theirs.fileno()), self._bounds
        arguments = ("--fd", fd, "--memory-bytes", str(bounds.memory_bytes), "--cpu-s", str(bounds.cpu_s))
        try:
            command = (*_COMMAND, "--parent", str(os.getpid()), *arguments)
            fds = (theirs.fileno(),)
            return ours, subprocess.Popen(command, pass_fds=fds, stdin=subprocess.DEVNULL, start_new_session=True)
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()


def _limit_of(code: int, tries: int) -> RenderLimit | None:
    """Returns the bound that was broken, or None.

    None: something else ended the process, and the job is tried once more.
    """
    if code == -signal.SIGXCPU:
        return RenderLimit.TIME
    return RenderLimit.PROCESS if tries >= _TRIES else None
