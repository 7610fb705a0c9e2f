"""The ranks of one collectives backend, which are started, run and timed together."""

from __future__ import annotations

import asyncio
import sys
from functools import partial
from typing import TypeVar

from ryzanstein import errors
from ryzanstein.lab.bench.engine.collectives.messages import BenchmarkAnswer, CollectiveRan, CollectiveReady, RunCollective
from ryzanstein.worker.ranks.channel import AgentChannel
from ryzanstein.worker.ranks.messages import RankCrashed, RankSpec
from ryzanstein.worker.ranks.starting.forking import ForkServer
from ryzanstein.worker.ranks.starting.process import RankProcess, end, exit_text, thread_environment
from ryzanstein.worker.ranks.starting.wiring import Wiring

_COMMAND = (sys.executable, "-P", "-m", "ryzanstein.lab.bench.engine.collectives.rank")
_ANSWER_S = 120.0
_LAST_WORDS_S = 0.05

Answer = TypeVar("Answer", CollectiveReady, CollectiveRan)


class CollectiveRanks:
    """Running ranks of one backend (`spec.collectives`).

    As an async context manager it starts them, and kills them at its end. Every call raises
    FAILED_PRECONDITION when a rank ends, fails or gets a wrong result, and DEADLINE_EXCEEDED when
    one does not answer.
    """

    def __init__(self, spec: RankSpec) -> None:
        self._spec = spec
        self._server: ForkServer | None = None
        self._processes: list[RankProcess] = []
        self._channels: list[AgentChannel[BenchmarkAnswer]] = []
        self._answers: asyncio.Queue[BenchmarkAnswer] = asyncio.Queue(
            maxsize=3 * spec.tp
        )  # an answer, a last message and an exit each

    async def __aenter__(self) -> CollectiveRanks:
        try:
            await self._spawn()
            await self._collect(CollectiveReady)
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await end(self._processes, grace_s=0.0)
        if self._server is not None:
            await self._server.close()
        for channel in self._channels:
            channel.close()

    async def run(self, request: RunCollective) -> list[CollectiveRan]:
        """Runs a request on all ranks. Returns what each rank timed."""
        for channel in self._channels:
            channel.send(request)
        return await self._collect(CollectiveRan)

    async def _collect(self, kind: type[Answer]) -> list[Answer]:
        answers: list[Answer] = []
        try:
            async with asyncio.timeout(_ANSWER_S):
                while len(answers) < self._spec.tp:
                    answers.append(self._expect(kind, await self._answers.get()))
        except TimeoutError as error:
            text = f"{self._spec.collectives}: {len(answers)} of {self._spec.tp} ranks answered within {_ANSWER_S:g} s"
            raise errors.deadline_exceeded(text) from error
        return answers

    def _expect(self, kind: type[Answer], answer: BenchmarkAnswer) -> Answer:
        if isinstance(answer, kind):
            return answer
        text = answer.message if isinstance(answer, RankCrashed) else f"unexpected answer {type(answer).__name__}"
        raise errors.failed_precondition("RANKS_FAILED", f"{self._spec.collectives}: rank {answer.rank}: {text}")

    async def _spawn(self) -> None:
        self._server = ForkServer(_COMMAND, thread_environment(self._spec))
        with Wiring(self._spec) as wiring:
            for wires in wiring.ranks:
                process = await self._server.fork(wires.start.rank, (wires.rank_end.fileno(), *wires.more_fds))
                process.exited.add_done_callback(partial(self._on_exit, wires.start.rank))
                self._processes.append(process)
        for wires in wiring.ranks:
            channel = AgentChannel[BenchmarkAnswer](BenchmarkAnswer, self._answers.put_nowait, lambda: None)
            self._channels.append(channel)
            await channel.open(wires.agent_end)
            channel.send(wires.start)

    def _on_exit(self, rank: int, exited: asyncio.Future[int]) -> None:
        """Reports a rank's exit a little later.

        The rank's last message says why, and must come first.
        """
        crashed = RankCrashed(rank, exit_text(exited.result()))
        asyncio.get_running_loop().call_later(_LAST_WORDS_S, self._answers.put_nowait, crashed)
