"""Follows the orchestrator: a node's models become those that it should serve.

`follow` takes the newest instruction at any time. A task compares it with what is there, and
changes each model in a task of its own: it adds, replaces or removes an agent's model. What an
operator does to an agent meanwhile stays, until the orchestrator wants something else of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any

import structlog

from ryzanstein.cluster import Instruction, ModelNeed, ModelReport, NodeState
from ryzanstein.errors import RyzansteinError
from ryzanstein.process.background import STOP, Background
from ryzanstein.worker.agent.idleness import Idleness
from ryzanstein.worker.agent.membership.wanted import WantedModel, wanted_models
from ryzanstein.worker.agent.memory.needs import ModelNeeds
from ryzanstein.worker.agent.memory.node_memory import ModelMemory, SharedRoom, gibibytes
from ryzanstein.worker.agent.model_host import ModelChoice
from ryzanstein.worker.agent.models import ModelAgent, NodeModels
from ryzanstein.worker.agent.operations import Replacement
from ryzanstein.worker.config import MAX_FURTHER_MODELS

log = structlog.get_logger(__name__)

_ROOM_AGAIN_S = 0.5
_SEEN_AFTER_S = 3.0
"""After a change the orchestrator has seen it by then: a beat says it, and what answered an earlier beat is void."""


@dataclass(frozen=True, slots=True)
class DeployedModel:
    """A model that an agent serves, or is about to."""

    model: WantedModel
    agent: ModelAgent


class StartNumbers:
    """A number for each start, which grows whenever what is seen of it differs from the last look."""

    def __init__(self) -> None:
        self._next = count(1)
        self._seen: dict[str, tuple[object, int]] = {}

    def look(self, sights: Mapping[str, object]) -> dict[str, int]:
        """Takes what is seen now of each start, by model; returns their numbers. What is not given has ended."""
        seen: dict[str, tuple[object, int]] = {}
        for model, sight in sights.items():
            known = self._seen.get(model)
            seen[model] = known if known is not None and known[0] == sight else (sight, next(self._next))
        self._seen = seen
        return {model: number for model, (_, number) in seen.items()}


class DeployedModels:
    """The models that the node should serve, and the agents that serve them.

    `started_with` is what the node serves unless deployments need its memory.
    """

    def __init__(
        self,
        models: NodeModels,
        memory: ModelMemory,
        needs: ModelNeeds,
        started_with: Sequence[ModelChoice],
        background: Background,
    ) -> None:
        self._models, self._memory, self._needs = models, memory, needs
        self._started_with, self._background = tuple(started_with), background
        self._instruction = Instruction()
        self._asked: tuple[str, ...] = ()
        self._served: dict[str, DeployedModel] = {}
        self._refused: dict[str, tuple[WantedModel, str]] = {}
        self._changes: dict[str, asyncio.Task[None]] = {}
        self._leaving: set[str] = set()
        self._waiting_for_room: set[str] = set()
        self._left: dict[str, ModelChoice] = {}
        self._seen: dict[str, int] = {}
        self._starts = StartNumbers()
        self._again = asyncio.Event()

    def start(self) -> None:
        """Loads what the node was started with, whether or not it fits."""
        for number, choice in enumerate(self._started_with):
            agent = self._models.add(choice.name) if number else self._models.first
            self._served[choice.name] = DeployedModel(WantedModel(choice), agent)
            agent.node.host.expect(choice)
            load = self._background.supervise("first_model", partial(self._load_first, agent, choice), STOP, finite=True)
            self._note(choice.name, None, load)

    def follow(self, instruction: Instruction) -> None:
        """Takes what the orchestrator wants of this node; it is repeated with every answer."""
        for agent in self._models:
            agent.operations.follow_drain(instruction.drain)
        self._asked = instruction.measure_paths
        wanted = replace(instruction, drain=False, measure_paths=(), members=None, adapters=None)
        if wanted != self._instruction:
            self._instruction = wanted
            log.info(
                "instructed",
                deployments={each.model: each.revision for each in wanted.deployments},
                epoch=wanted.leader.epoch,
                leader_id=wanted.leader.leader_id,
            )
            self._forget_refusals()
            self._again.set()

    def _forget_refusals(self) -> None:
        """Forgets the refusals of what the orchestrator does not want any more."""
        wanted = {ModelChoice.at(each.path, each.model, each.revision) for each in self._instruction.deployments}
        for name, (model, _) in list(self._refused.items()):
            if model.choice not in wanted:
                del self._refused[name]
                if name in self._served:
                    self._served[name].agent.operations.forget_refusal()

    def needs(self) -> tuple[ModelNeed, ...]:
        """Returns the needs that the orchestrator asked for, as far as they are known."""
        return self._needs.ask(self._asked)

    def reports(self) -> tuple[ModelReport, ...]:
        """Returns the state of every model, and of those that the node refused."""
        served = [self._report(name, each) for name, each in self._served.items()]
        refused = [
            ModelReport(name, model.choice.path, model.choice.revision, NodeState.FAILED, reason=reason)
            for name, (model, reason) in self._refused.items()
            if name not in self._served
        ]
        return (*served, *refused)

    def starts(self) -> dict[str, int]:
        """Returns, of each deployment that the node is not ready with, a number that grows whenever its start moves.

        What was refused or has failed is left out, since the reports say so; and what starts out of sight.
        """
        sights = {}
        for each in self._instruction.deployments:
            sight = self._sight(each.model, ModelChoice.at(each.path, each.model, each.revision))
            if sight is not None:
                sights[each.model] = sight
        return self._starts.look(sights)

    def _sight(self, name: str, wanted: ModelChoice) -> tuple[object, ...] | None:
        """Returns what is seen of a start; None: there is none, or it cannot be seen.

        A start may wait for answers that still run: those on models that leave, and on the version that it replaces.
        """
        served, refused = self._served.get(name), self._refused.get(name)
        if name in self._waiting_for_room or (refused is not None and refused[0].choice == wanted):
            return None
        leaving = [self._served[each].agent.node for each in self._leaving]
        waits = tuple((node.num_running, node.versions.step) for node in leaving)
        if served is None:
            return waits
        node, following = served.agent.node, served.agent.operations.replacement
        if following is not None:
            return following.sight()
        if served.model.choice == wanted and node.host.state in (NodeState.READY, NodeState.FAILED):
            return None
        sight = node.version.sight()
        return None if sight is None else (*sight, node.num_running, node.versions.step, *waits)

    async def run(self) -> None:
        """Changes the node's models as instructed, until cancelled."""
        while True:
            await self._again.wait()
            self._again.clear()
            instruction = self._instruction
            await self._measure(instruction)
            if instruction == self._instruction:
                self._change_all(wanted_models(instruction, self._started_with, self._need, self._memory.total))

    async def _measure(self, instruction: Instruction) -> None:
        """Measures the directories of which nothing is known yet."""
        for path in [each.path for each in instruction.deployments] + [choice.path for choice in self._started_with]:
            if not self._needs.known(path):
                await self._needs.of(path)

    def _need(self, path: str) -> int:
        """Returns the larger of what a model may take and what it was seen to take."""
        return max(self._needs.known(path), self._seen.get(path, 0))

    def _change_all(self, wanted: dict[str, WantedModel]) -> None:
        """Starts what makes the node's models the wanted ones.

        A model that is being changed is looked at again afterwards.
        """
        for name in [name for name in self._served if name not in wanted]:
            self._change(name, None, partial(self._remove, name))
        for name, model in wanted.items():
            served, refused = self._served.get(name), self._refused.get(name)
            if refused is not None and refused[0].choice == model.choice:
                continue
            if served is None:
                self._change(name, model, partial(self._add, name, model))
            elif served.model.choice != model.choice:
                # Who says to keep what was just replaced has not seen that it was.
                if self._left.get(name) != model.choice:
                    self._change(name, model, partial(self._replace, name, model))
            elif served.model != model:
                self._change(name, model, partial(self._adopt, name, model))

    def _change(self, name: str, wanted: WantedModel | None, change: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Runs a change of a model, unless another one runs. `wanted`: what it leads to; None: nothing."""
        if name not in self._changes:
            self._note(name, wanted, self._background.once("change_model", change()))

    def _note(self, name: str, wanted: WantedModel | None, change: asyncio.Task[None]) -> None:
        self._changes[name] = change
        change.add_done_callback(partial(self._changed, name, wanted))

    def _changed(self, name: str, wanted: WantedModel | None, change: asyncio.Task[None]) -> None:
        """Looks at all models again. A change that failed is not tried again by itself."""
        del self._changes[name]
        if wanted is not None and not change.cancelled() and (error := change.exception()) is not None:
            self._refuse(name, wanted, f"{type(error).__name__}: {error}")
        self._again.set()

    async def _load_first(self, agent: ModelAgent, choice: ModelChoice) -> None:
        self._memory.grow(agent, (await self._needs.of(choice.path)).bytes)
        if self._memory.free < 0:
            log.warning("memory is short", model=choice.name, missing=gibibytes(-self._memory.free))
        await agent.operations.load_first(choice)

    async def _remove(self, name: str) -> None:
        agent = self._served[name].agent
        self._leaving.add(name)
        try:
            await agent.operations.retire()
        finally:
            self._leaving.discard(name)
            del self._served[name]
            agent.node.idleness.keep_awake()
            self._memory.give_back(agent)
        if agent is not self._models.first:
            await self._models.remove(name)

    async def _add(self, name: str, model: WantedModel) -> None:
        """Loads a model that the node does not have, when what gives way for it is gone."""
        need = await self._needs.of(model.choice.path)
        while self._leaving and (need.bytes > self._memory.free or not self._instruction.plural):
            await self._memory.freed()
        missing = 0 if model.idle_unload_s else need.bytes - self._memory.free
        if missing > 0 and self._instruction.plural:
            self._refuse(name, model, f"it needs {gibibytes(need.bytes)}, and {gibibytes(missing)} of that are not free")
        elif (agent := self._free_agent(name)) is None:
            self._refuse(name, model, f"the node has {1 + MAX_FURTHER_MODELS} models")
        else:
            self._served[name] = DeployedModel(model, agent)
            await self._take_room(name, need.bytes)
            await agent.operations.change_over(model.choice)

    def _refuse(self, name: str, model: WantedModel, reason: str) -> None:
        log.error("deployment refused", model=name, reason=reason)
        self._refused[name] = (model, reason)

    def _free_agent(self, name: str) -> ModelAgent | None:
        """Returns an agent for a new model; None when the node has too many."""
        first = self._models.first
        if all(served.agent is not first for served in self._served.values()):
            return first
        return self._models.add(name) if self._models.num_others < MAX_FURTHER_MODELS else None

    async def _replace(self, name: str, model: WantedModel) -> None:
        """Changes a model that the node has to another directory, or loads its files again."""
        before, agent = self._served[name].model, self._served[name].agent
        if before.choice.path == model.choice.path and not before.choice.revision:
            await self._adopt(name, model)  # it was started with this very directory
            return
        need, alongside = await self._needs.of(model.choice.path), (agent, model.choice)
        if agent.node.host.serving is not None and self._memory.take(alongside, need.bytes):
            await self._replace_alongside(name, model, alongside)
        else:
            await self._replace_in_place(name, model, need.bytes)
        if name in self._served and self._served[name].model.choice != before.choice:
            self._leave(name, before.choice)

    def _leave(self, name: str, choice: ModelChoice) -> None:
        """Notes what a model was before, for as long as the orchestrator may not have seen the change."""
        self._left[name] = choice
        asyncio.get_running_loop().call_later(_SEEN_AFTER_S, self._seen_to_have_left, name, choice)

    def _seen_to_have_left(self, name: str, choice: ModelChoice) -> None:
        if self._left.get(name) is choice:
            del self._left[name]
            self._again.set()

    async def _replace_in_place(self, name: str, model: WantedModel, size: int) -> None:
        """Unloads the old version, then loads the new one; goes back when the node cannot serve that."""
        before, agent = self._served[name].model, self._served[name].agent
        served = agent.node.host.serving is not None
        taken = self._memory.taken(agent)
        self._served[name] = DeployedModel(model, agent)
        self._memory.give_back(agent)
        await self._take_room(name, size)
        await agent.operations.change_over(model.choice)
        reason = await agent.operations.refusal(model.choice)
        if served and reason and self._served[name].model == model:
            self._refuse(name, model, reason)
            self._served[name] = DeployedModel(before, agent)
            self._memory.give_back(agent)
            await self._take_room(name, taken)
            await agent.operations.change_over(before.choice)
            agent.operations.report_refusal(model.choice, reason)

    async def _replace_alongside(self, name: str, model: WantedModel, alongside: tuple[ModelAgent, ModelChoice]) -> None:
        agent = self._served[name].agent
        try:
            if await agent.operations.replace(model.choice):
                self._served[name] = DeployedModel(model, agent)
                self._memory.hand_over(alongside, agent)
                await self._adopt(name, model)
            else:
                self._refused[name] = (model, "")
        finally:
            self._memory.give_back(alongside)

    async def _adopt(self, name: str, model: WantedModel) -> None:
        """Changes only how the model is kept: its revision, and when it sleeps."""
        agent = self._served[name].agent
        self._served[name] = DeployedModel(model, agent)
        await self._take_room(name, self._memory.taken(agent))
        if not model.idle_unload_s:
            await agent.node.host.wake()

    async def _take_room(self, name: str, size: int) -> None:
        """Takes memory for a model that is about to be loaded.

        One that may sleep waits until others like it give way.
        """
        model, agent = self._served[name].model, self._served[name].agent
        agent.node.idleness.unload_s = model.idle_unload_s
        if not model.idle_unload_s:
            agent.node.idleness.room = None
            self._memory.grow(agent, size)
            return
        room = agent.node.idleness.room = SharedRoom(self._memory, agent, partial(self._resting, agent), name, size)
        while True:
            self._waiting_for_room.add(name)
            try:
                await room.take()
                return
            except RyzansteinError as error:
                log.warning("model waits for memory", model=name, reason=error.message)
                await asyncio.sleep(_ROOM_AGAIN_S)
            finally:
                self._waiting_for_room.discard(name)

    def _resting(self, but: ModelAgent) -> list[Idleness]:
        """Returns the models that may be put to sleep now for another one."""
        awake = (served.agent.node for served in self._served.values() if served.agent is not but)
        models = (node.idleness for node in awake if node.host.serving is not None)
        return [model for model in models if model.unload_s and model.rested_s > 0]

    def _report(self, name: str, served: DeployedModel) -> ModelReport:
        model, node = served.model, served.agent.node
        beat, path = node.beat(), model.choice.path
        self._seen[path] = max(self._seen.get(path, 0), node.version.seen_bytes)
        if self._memory.taken(served.agent):
            self._memory.grow(served.agent, self._seen[path])
        following = served.agent.operations.replacement or Replacement(model.choice, NodeState.UNSPECIFIED)
        return ModelReport(
            model=name,
            path=path,
            revision=model.choice.revision,
            state=beat.state,
            context_length=beat.context_length,
            load=beat.load,
            reason=beat.reason,
            memory_bytes=max(self._memory.taken(served.agent), self._need(path)),
            started_with=any(choice.name == name for choice in self._started_with),
            asleep=node.host.asleep,
            next_revision=0 if following.state is NodeState.UNSPECIFIED else following.choice.revision,
            next_state=following.state,
            next_reason=following.reason,
            progress=following.loading() or node.version.loading(),
            content=beat.numerics.content,
        )
