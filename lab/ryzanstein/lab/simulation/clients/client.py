"""One simulated client: it asks, waits for the answers, thinks, and asks again."""

from __future__ import annotations

import asyncio

from ryzanstein.lab.simulation.checks import Checks
from ryzanstein.lab.simulation.clients.asking import Asking, ClientTally
from ryzanstein.lab.simulation.clients.conversations import ConversationChecks
from ryzanstein.lab.simulation.clients.questions import Questions
from ryzanstein.lab.simulation.clients.twice import Twice
from ryzanstein.lab.simulation.cluster import Cluster
from ryzanstein.lab.simulation.planning.plan import ClientPlan


class SimulatedClient:
    """A simulated client. `run` it in its own process until the plan's duration is over."""

    def __init__(self, plan: ClientPlan, cluster: Cluster, checks: Checks, tally: ClientTally) -> None:
        self.plan, self._cluster, self._checks, self._tally = plan, cluster, checks, tally
        self._rng = cluster.rng(f"client {plan.number}")
        self._asking = 0
        self._answered = asyncio.Event()
        self.questions = Questions(plan, cluster.plan)
        self.sessions = ConversationChecks(cluster, checks, plan.number)

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(3.0 + self._rng.random())
        async with asyncio.TaskGroup() as asking:
            while loop.time() < self._cluster.plan.duration_s and self._tally.tokens < self._cluster.plan.max_tokens:
                for _ in range(self.plan.burst if self._rng.random() < 0.1 else 1):
                    self._asking += 1
                    asking.create_task(self._ask(self._rng.random())).add_done_callback(self._one_less)
                await self._idle()
                await asyncio.sleep(self._rng.expovariate(1 / self.plan.think_s) + 0.01)
                await self._while_idle()

    async def _idle(self) -> None:
        """Returns when everything is answered.

        Otherwise requests would pile up while nothing comes back.
        """
        while self._asking:
            await self._answered.wait()
            self._answered.clear()

    def _one_less(self, _: object) -> None:
        self._asking -= 1
        self._answered.set()

    async def _while_idle(self) -> None:
        now = asyncio.get_running_loop().time()
        for begins, ends in self._cluster.plan.idle:
            if begins <= now < ends:
                await asyncio.sleep(ends - now + self._rng.random())

    async def _ask(self, chance: float) -> None:
        rng = self.questions.next_rng(chance)
        conversation = self.questions.conversation()
        if conversation is not None and conversation.doubtful is not None and not self.questions.interrupts():
            await self.sessions.settle(conversation, rng)
            conversation = self.questions.conversation()
        question = self.questions.draw(rng, conversation)
        asking = Asking(question, self.plan, self._cluster, checks=self._checks, tally=self._tally, rng=rng)
        outcome = await Twice(asking, self._cluster, self._checks).run()
        if outcome == "complete":
            await self.sessions.compare(asking, conversation)
        self._tally.count(outcome)
        self._tally.tokens += asking.answer.num_tokens
        self._cluster.record.say(
            "answered", client=self.plan.number, key=question.key, outcome=outcome, tokens=asking.answer.num_tokens
        )
        if conversation is not None:
            conversation.remember(question, asking.answer, complete=outcome == "complete")
