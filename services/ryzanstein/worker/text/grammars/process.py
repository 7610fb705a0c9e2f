"""The agent's side of its grammar process: starts it with the first constraint, asks, remembers verdicts.

Verdicts and tables of tokens are kept while the model is the node's. When the process ends, what
was asked is answered with UNAVAILABLE: another node may be tried, or the same one again.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec

from ryzanstein import errors
from ryzanstein.constraints import Constraint
from ryzanstein.errors import RyzansteinError
from ryzanstein.worker.text.grammars.frames import Answer, Close, Judge, Open, Opened, Request, Unreadable
from ryzanstein.worker.text.grammars.judge import Verdict
from ryzanstein.worker.text.grammars.link import Answered, GrammarLink
from ryzanstein.worker.text.grammars.verdicts import GrammarObserver, RememberedVerdicts
from ryzanstein.worker.text.programs.starting import AgentProgram, ProgramBounds
from ryzanstein.worker.text.tokenizer import TextModel

_PROGRAM = AgentProgram(
    "grammar process",
    "ryzanstein.worker.text.grammars.program",
    socket.SOCK_SEQPACKET,
    # It forks, so it has no threads of libraries.
    {"OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
)
_OPEN_S = 120.0
_PATIENCE = 15
"""Seconds of waiting per second of computing; the forks end themselves before."""
_AT_ONCE = 2
_MAX_MODELS = 32  # as many as a node may have


@dataclass(slots=True)
class _Model:
    """A model that the process has open. `text` is compared by identity: a new version is opened anew.

    The `key` names it there: two models of one directory may have templates with other control tokens.
    """

    text: TextModel
    key: str
    table: asyncio.Future[bytes]
    verdicts: RememberedVerdicts = field(default_factory=RememberedVerdicts)


class GrammarProcess:
    """A `ConstraintJudge` whose process `run` keeps running, from the first constraint on."""

    def __init__(self, bounds: ProgramBounds, observer: GrammarObserver) -> None:
        self._bounds, self._observer = bounds, observer
        self._link = GrammarLink()
        self._models: dict[str, _Model] = {}
        self._places = asyncio.Semaphore(_AT_ONCE)
        self._num_waiting = 0
        self.able = find_spec("llguidance") is not None

    async def judge(self, constraint: Constraint, model: TextModel, scope: str = "") -> Verdict:
        opened = await self._opened(model)
        known = opened.verdicts.get(scope, constraint)
        self._observer.looked_up(known is not None)
        if known is None:
            known = await self._judged(scope, constraint, opened)
        if isinstance(known, RyzansteinError):
            raise known
        return known

    async def tokens(self, model: TextModel) -> bytes:
        return await (await self._opened(model)).table

    async def run(self) -> None:
        """Runs a process from the first constraint on, until cancelled.

        Raises ProgramLost when it ended. Start it again then, after a pause if that happens often.
        """
        await self._link.wanted()
        program = _PROGRAM.start(self._bounds)
        try:
            with self._link.over(program.ours):
                await asyncio.shield(program.process.over)
                raise _PROGRAM.ended(await program.process.exited)
        finally:
            self._models.clear()
            await program.killed()

    async def _opened(self, model: TextModel) -> _Model:
        """Returns the model, open in the process.

        Calls at the same time wait for the same opening, which goes on when they are cancelled.
        """
        known = self._models.get(_key(model))
        if known is None or known.text is not model or (known.table.done() and known.table.exception() is not None):
            known = self._open(model)
        self._models[known.key] = self._models.pop(known.key)  # the last one that was used
        try:
            async with asyncio.timeout(_OPEN_S):
                await asyncio.shield(known.table)
        except TimeoutError:
            raise _PROGRAM.silent() from None
        return known

    def _open(self, model: TextModel) -> _Model:
        key = _key(model)
        self._close(key)
        known = self._models[key] = _Model(model, key, asyncio.get_running_loop().create_future())
        known.table.add_done_callback(_look)
        make = partial(Open, key=key, path=model.path, name=model.name, template_file=str(model.template_file or ""))
        self._link.asked(make).add_done_callback(partial(_read_table, known.table))
        return known

    def _close(self, key: str) -> None:
        """Closes this model if it is open, and the one that was not used for longest if too many are."""
        keys = [key] if key in self._models else []
        if len(self._models) >= _MAX_MODELS:
            keys = keys or [next(iter(self._models))]
        for each in keys:
            del self._models[each]
            self._link.post(Close(each))

    async def _judged(self, scope: str, constraint: Constraint, model: _Model) -> Verdict | RyzansteinError:
        """Returns the verdict of the process, and remembers it."""
        self._bounds.admit(self._num_waiting)
        self._num_waiting += 1
        try:
            async with self._places:
                if (known := model.verdicts.get(scope, constraint)) is not None:
                    return known  # many ask for one constraint at the same time
                answer = await self._ask(partial(Judge, key=model.key, constraint=constraint))
                known = self._observer.verdict(constraint, answer)
                model.verdicts.add(scope, constraint, known)
                return known
        finally:
            self._num_waiting -= 1

    async def _ask(self, make: Callable[[int], Request]) -> Answer:
        try:
            async with asyncio.timeout(_PATIENCE * self._bounds.cpu_s):
                answer, _ = await self._link.asked(make)
                return answer
        except TimeoutError:
            raise _PROGRAM.silent() from None


def _key(model: TextModel) -> str:
    return "\0".join((model.path, model.name, str(model.template_file or "")))


def _read_table(table: asyncio.Future[bytes], answer: asyncio.Future[Answered]) -> None:
    """Sets the table of tokens from the answer that comes with it."""
    try:
        table.set_result(_content(*answer.result()))
    except Exception as error:  # whatever it is, those who wait for the table must learn it
        table.set_exception(error)


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


def _look(future: asyncio.Future[bytes]) -> None:
    """Looks at an error for which nobody may wait any more."""
    if not future.cancelled():
        future.exception()
