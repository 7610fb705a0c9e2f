"""The agent's side of its template process: starts it, sends it jobs, kills it if a template hangs.

One job runs at a time; the others wait their turn, up to a bound. The process holds no state that
is not in the next job. When it ends, the job that was running is sent once more, to the next
process.
"""

from __future__ import annotations

import asyncio
import signal
import socket
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import msgspec
import structlog

from ryzanstein import errors
from ryzanstein.generation.prompts import ChatPrompt
from ryzanstein.worker.text.programs.starting import AgentProgram, ProgramBounds, RunningProgram
from ryzanstein.worker.text.templates.frames import LENGTH, MAX_FRAME_BYTES, Answer, TemplateJob, TemplateReady, framed
from ryzanstein.worker.text.templates.rendering import Limited, Rendered, RenderLimit, TemplateSource, rendered

log = structlog.get_logger(__name__)

_PROGRAM = AgentProgram("template process", "ryzanstein.worker.text.templates.program", socket.SOCK_STREAM)
_START_S = 60.0
_PATIENCE = 10
"""Seconds of waiting per second of computing, because cores are shared."""
_TRIES = 2


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

    program: RunningProgram
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    template: TemplateSource | None = field(default=None)

    async def ask(self, template: TemplateSource, prompt: ChatPrompt | None) -> Answer:
        """Sends a job and returns the answer. EOFError, ConnectionError: the process has ended."""
        known = template is self.template
        self.template = template
        self.writer.write(framed(TemplateJob(None if known else template, prompt)))
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
        return await self.program.killed()


class TemplateProcess:
    """A `ChatRenderer` that renders in a process. `run` keeps the process running.

    Until it runs, and between two processes, jobs wait. `on_limit` is called for each bound that a
    template broke.
    """

    def __init__(self, bounds: ProgramBounds, on_limit: Callable[[RenderLimit], None]) -> None:
        self._bounds = bounds
        self._on_limit = on_limit
        self._waiting: deque[_Asked] = deque()
        self._more = asyncio.Event()

    async def check(self, template: TemplateSource) -> None:
        answer = await self._ask(template, None)
        if not isinstance(answer, TemplateReady):
            rendered(answer)

    async def render(self, template: TemplateSource, prompt: ChatPrompt) -> Rendered:
        answer = await self._ask(template, prompt)
        if isinstance(answer, TemplateReady):
            raise errors.internal("the template process sent an unexpected answer")
        return rendered(answer)

    async def run(self) -> None:
        """Runs a template process until cancelled.

        Raises ProgramLost when the process ended. Start it again then, after a pause if that
        happens often.
        """
        async with self._started() as child:
            log.info("template process ready", pid=child.program.process.pid)
            while True:
                await self._answer_next(child)

    async def _ask(self, template: TemplateSource, prompt: ChatPrompt | None) -> Answer:
        self._bounds.admit(len(self._waiting))
        asked = _Asked(template, prompt, asyncio.get_running_loop().create_future())
        self._waiting.append(asked)
        self._more.set()
        try:
            async with asyncio.timeout(_START_S):
                answer = await asked.answer
        except TimeoutError:
            raise _PROGRAM.silent() from None
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

        Raises ProgramLost when the process ended or was too late. If this was the first end over
        this job, the job stays the next one.
        """
        asked.tries += 1
        try:
            async with asyncio.timeout(_PATIENCE * self._bounds.cpu_s):
                return await child.ask(asked.template, asked.prompt)
        except (TimeoutError, EOFError, ConnectionError) as error:
            code = await child.ended()
            limit = _limit_of(code, asked.tries)
            if limit is not None and not asked.answer.done():
                asked.answer.set_result(Limited(limit))
            raise (_PROGRAM.late() if isinstance(error, TimeoutError) else _PROGRAM.ended(code)) from error

    @asynccontextmanager
    async def _started(self) -> AsyncIterator[_Child]:
        program = _PROGRAM.start(self._bounds)
        child = _Child(program, *await asyncio.open_connection(sock=program.ours))
        try:
            async with asyncio.timeout(_START_S):
                await child.read()
            yield child
        except (EOFError, ConnectionError, TimeoutError) as error:
            raise _PROGRAM.ended(await child.ended(), " during startup") from error
        finally:
            await child.ended()


def _limit_of(code: int, tries: int) -> RenderLimit | None:
    """Returns the bound that was broken, or None.

    None: something else ended the process, and the job is tried once more.
    """
    if code == -signal.SIGXCPU:
        return RenderLimit.TIME
    return RenderLimit.PROCESS if tries >= _TRIES else None
