"""Plays a story on a running cluster and judges which promises were kept.

It shows nothing itself: an `Audience` does.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Protocol

from ryzanstein.cli.demo.fault import Failover, MidAnswerKill
from ryzanstein.cli.demo.story import Story, StoryTurn
from ryzanstein.cli.processes.cluster import LocalCluster
from ryzanstein.cli.status import scrape
from ryzanstein.client import Answer, AsyncClient, Text
from ryzanstein.v1 import inference_pb2 as pb

SESSION_ID = "demo"
ANSWER_TIMEOUT_S = 20.0
_REROUTED = "ryzanstein_router_detected_to_rerouted_seconds"


class Audience(Protocol):
    """An observer that shows the demonstration."""

    def asked(self, text: str) -> None: ...

    def spoken(self, node_id: str, text: str) -> None:
        """Receives the next piece of the answer, from the node that generated it."""
        ...

    def answered(self, answer: Answer) -> None: ...

    def compared(self, answer: Answer) -> None:
        """Receives the long answer as generated without a fault, for comparison."""
        ...

    def killed(self, node_id: str, pid: int, num_tokens: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Exchange:
    """One turn of the conversation and its result."""

    asked: str
    answered: str
    node_ids: tuple[str, ...]
    time_to_first_token_s: float | None


@dataclass(frozen=True, slots=True)
class Promise:
    """A condition that must hold, and what was observed."""

    name: str
    kept: bool
    seen: str


@dataclass(frozen=True, slots=True)
class DemoReport:
    """Everything that was observed."""

    exchanges: tuple[Exchange, ...]
    failover: Failover
    promises: tuple[Promise, ...]

    @property
    def kept(self) -> bool:
        return all(promise.kept for promise in self.promises)


class Demonstration:
    """Plays `story` on `cluster`, once. All answers are greedy and in one session."""

    def __init__(self, cluster: LocalCluster, story: Story, audience: Audience) -> None:
        self._cluster = cluster
        self._story = story
        self._audience = audience
        self._exchanges: list[Exchange] = []
        self._recalls: list[Promise] = []

    async def run(self) -> DemoReport:
        """Plays the story and returns the report.

        Raises RyzansteinError if a request fails: none may.
        """
        async with AsyncClient(self._cluster.router_address, timeout_s=ANSWER_TIMEOUT_S) as client:
            for turn in self._story.before:
                await self._say(client, turn)
            undisturbed = await self._undisturbed(client)
            failover = await self._disturbed(client, undisturbed)
            afterwards = [await self._say(client, turn) for turn in self._story.after]
        promises = (*judge(failover, afterwards), *self._recalls)
        return DemoReport(tuple(self._exchanges), failover, promises)

    async def _say(self, client: AsyncClient, turn: StoryTurn, kill: MidAnswerKill | None = None) -> Answer:
        """Plays one turn in the session and records whether the answer is right."""
        self._audience.asked(turn.says)
        async with client.stream(turn.says, session=SESSION_ID, temperature=0.0) as stream:
            async for event in stream:
                if isinstance(event, Text):
                    self._audience.spoken(event.node, event.text)
                    if kill is not None and kill.watch(event):
                        self._audience.killed(kill.victim, kill.victim_pid, kill.tokens_at_death)
        answer = stream.answer
        self._audience.answered(answer)
        self._exchanges.append(Exchange(turn.says, answer.text, tuple(answer.nodes), answer.time_to_first_token_s))
        right = all(part in answer.text for part in turn.expects)
        self._recalls.append(Promise(f"correct answer: {turn.says}", right, answer.text))
        return answer

    async def _undisturbed(self, client: AsyncClient) -> Answer:
        """Returns the long answer to the same conversation, without a fault.

        It is given outside the session.
        """
        stored = await client.sessions.get(SESSION_ID)
        question = pb.Message(role=pb.ROLE_USER, content=self._story.long_turn.says)
        answer = await client.chat([*stored.messages, question], temperature=0.0)
        self._audience.compared(answer)
        return answer

    async def _disturbed(self, client: AsyncClient, undisturbed: Answer) -> Failover:
        """Plays the long turn in the session and kills the node that generates it on the way."""
        kill = MidAnswerKill(self._cluster, self._story.kill_after_tokens)
        answer = await self._say(client, self._story.long_turn, kill)
        metrics_url = self._cluster.services[self._cluster.router_names[0]].metrics_url
        rerouted_s = await asyncio.to_thread(mean_reroute_s, metrics_url)
        return kill.report(answer, undisturbed, rerouted_s)


def judge(failover: Failover, afterwards: list[Answer]) -> tuple[Promise, ...]:
    """Returns the promises about the failover."""
    moved = bool(failover.killed_node) and failover.continued_on != failover.killed_node
    route = f"{failover.killed_node or 'no node was killed'} -> {failover.continued_on}"
    later = [node_id for answer in afterwards for node_id in answer.nodes]
    return (
        Promise("the answer continued on another node", moved, route),
        Promise("the answer is identical to the undisturbed one", failover.identical, f"{failover.tokens} tokens"),
        Promise("tokens lost: 0", failover.lost == 0, str(failover.lost)),
        Promise("tokens repeated: 0", failover.repeated == 0, str(failover.repeated)),
        Promise("the router counted the failover", failover.detected_to_rerouted_s is not None, _REROUTED),
        Promise("the conversation continues on another node", failover.killed_node not in later, ", ".join(sorted(set(later)))),
    )


def mean_reroute_s(metrics_url: str) -> float | None:
    """Returns the mean time from a fault's detection to the attempt on the next node.

    Returns None if there was no failover, or nobody answers.
    """
    try:
        count = scrape.total(metrics_url, f"{_REROUTED}_count")
        return scrape.total(metrics_url, f"{_REROUTED}_sum") / count if count else None
    except OSError:
        return None
