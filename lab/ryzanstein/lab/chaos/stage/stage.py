"""A cluster on separate hosts with clients, ready for faults.

It is built for a layout and mended after each strike.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from ryzanstein.addresses import split_address
from ryzanstein.auth.peers.peer import Peer, PeerRole
from ryzanstein.cli.processes.cluster import LocalCluster
from ryzanstein.cli.processes.service_process import ServiceFailedError, wait_all_ready
from ryzanstein.demo import MODEL_DIR
from ryzanstein.lab.chaos.client_load import ClientLoad
from ryzanstein.lab.chaos.machines.network import HostNetwork
from ryzanstein.lab.chaos.questions import (
    FORM_QUESTIONS,
    LONG_QUESTIONS,
    PATIENT_QUESTIONS,
    QUESTIONS,
    SERVER_QUESTIONS,
    questions_to,
    questions_to_adapters,
)
from ryzanstein.lab.chaos.stage.layouts import ClusterLayout
from ryzanstein.lab.chaos.stage.logs import LogReader
from ryzanstein.lab.chaos.stage.plan import TrialPlan, plan
from ryzanstein.lab.chaos.stage.scrape import BREAKER_STATE, scrape
from ryzanstein.lab.clients import judge
from ryzanstein.lab.clients.forms import AnswerForm
from ryzanstein.lab.clients.question import LoadQuestion
from ryzanstein.lab.clients.reading import AnswerReading
from ryzanstein.lab.clients.transport import RouterAddress
from ryzanstein.rpc.client import PLAIN, Dialer
from ryzanstein.v1 import worker_pb2 as worker
from ryzanstein.v1 import worker_pb2_grpc as worker_grpc

RECOVERY_WIDTH = 2
_POLL_S = 0.1
_STATUS_S = 5.0


class LaboratoryError(Exception):
    """The laboratory itself failed, so its results would mean nothing."""


@dataclass(slots=True)
class Stage:
    """What faults and runs work with.

    `undisturbed` are answers without a fault, by (kind, turn), and `forms` what they have to look
    like, by kind, where that is demanded. `struck_at` is wall and monotonic time. `rank_pids` are by
    the names that routers have for nodes: node-0/b is model b of node-0.
    """

    plan: TrialPlan
    cluster: LocalCluster
    load: ClientLoad
    logs: LogReader
    rank_pids: dict[str, list[int]] = field(default_factory=dict)
    undisturbed: dict[tuple[str, int], AnswerReading] = field(default_factory=dict)
    forms: dict[str, AnswerForm] = field(default_factory=dict)
    struck_at: tuple[float, float] = (0.0, 0.0)

    def strikes_now(self) -> None:
        """Records the time of the strike.

        A fault that takes time to prepare calls this just before it begins.
        """
        self.struck_at = (time.time(), time.monotonic())

    @property
    def layout(self) -> ClusterLayout:
        return self.plan.layout

    @property
    def network(self) -> HostNetwork:
        """Returns the network. Raises LaboratoryError if there is none on this machine."""
        if self.plan.network is None:
            raise LaboratoryError("this fault needs network namespaces")
        return self.plan.network

    def host_of(self, name: str) -> str:
        """Returns the network's name of a service's host."""
        return self.plan.host_name(name)

    def address_of(self, name: str) -> str:
        return split_address(self.cluster.services[name].grpc_address)[0]

    def router(self, name: str) -> RouterAddress:
        """Returns how clients reach a router."""
        return _router(self.cluster, name)

    def listener(self, name: str) -> Dialer:
        """Returns how one more router of this name dials nodes."""
        authorities = self.cluster.state_dir / "tls"
        if not self.layout.secure:
            return PLAIN
        from ryzanstein.auth.peers.authority import Authority
        from ryzanstein.rpc.tls.service_tls import operator_dialer

        Authority.open(authorities).write(Peer(PeerRole.ROUTER, name), authorities / name, renew=True)
        return operator_dialer(authorities / name)

    def judge(self, reading: AnswerReading) -> judge.Verdict:
        return judge.judge(self.undisturbed[reading.kind, reading.turn], reading, self.forms.get(reading.kind))

    def tokens_left(self, reading: AnswerReading) -> int:
        """Returns how many tokens the answer still lacks."""
        return self.undisturbed[reading.kind, reading.turn].num_tokens - reading.num_tokens

    def longest(self, kind: str) -> int:
        """Returns the tokens of the longest answer of a kind."""
        return max(answer.num_tokens for (name, _), answer in self.undisturbed.items() if name == kind)

    async def look_at_ranks(self) -> None:
        """Reads the process ids of the ranks, which change with a restart."""
        for node_id in self.cluster.node_ids:
            node = Peer(PeerRole.NODE, node_id)
            async with self.cluster.dialer.open(self.cluster.services[node_id].grpc_address, node) as channel:
                stub = worker_grpc.WorkerServiceStub(channel)
                for model in ("", *self.layout.further_models):
                    status = await stub.GetStatus(worker.GetStatusRequest(model=model), timeout=_STATUS_S)
                    self.rank_pids[f"{node_id}/{model}" if model else node_id] = [rank.pid for rank in status.ranks]

    async def ask_undisturbed(self) -> None:
        """Asks every question twice without a fault. Raises LaboratoryError, see `learn`."""
        for question in _questions(self.layout):
            await self.learn(question)

    async def learn(self, question: LoadQuestion) -> None:
        """Records the answer to a question without a fault.

        Raises LaboratoryError if it fails, lacks its form, or differs when asked again.
        """
        if (question.kind, 0) not in self.undisturbed:
            if question.form is not None:
                self.forms[question.kind] = question.form
            first, second = await self.load.ask(question, 0), await self.load.ask(question, 1)
            for reading, again in zip(first, second, strict=True):
                verdict = judge.judge(reading, again, question.form)
                if not judge.judge(reading, reading, question.form).flawless or not verdict.flawless:
                    raise LaboratoryError(f"the answers to {question.kind} differ without a fault: {reading.failure} {verdict}")
                self.undisturbed[reading.kind, reading.turn] = reading

    async def mend(self, timeout_s: float) -> bool:
        """Restarts what ended, and waits until all nodes serve and no breaker is open.

        Returns False on timeout.
        """
        deadline = time.monotonic() + timeout_s
        self.load.set_width(RECOVERY_WIDTH)
        return await self.serving(timeout_s) and await self._breakers_closed(deadline)

    async def serving(self, timeout_s: float) -> bool:
        """Restarts what ended, and waits until all nodes serve. Returns False on timeout."""
        deadline = time.monotonic() + timeout_s
        services = list(self.cluster.services.values())
        restarted: set[str] = set()
        while time.monotonic() < deadline:
            ended = [service for service in services if not service.running]
            if any(service.name in restarted for service in ended):
                return False
            for service in ended:
                service.kill()
                service.start()
                restarted.add(service.name)
            try:
                await asyncio.to_thread(wait_all_ready, services, deadline)
                await asyncio.to_thread(self.cluster.wait_nodes, self.layout.nodes, max(0.0, deadline - time.monotonic()))
            except ServiceFailedError:
                # A killed process may take a moment to end: it counted as running above.
                await asyncio.sleep(_POLL_S)
            else:
                return True
        return False

    async def metrics(self) -> dict[str, dict[str, float]]:
        urls = {name: service.metrics_url for name, service in self.cluster.services.items() if service.running}
        return {name: dict(samples) for name, samples in (await scrape(urls)).items()}

    async def _breakers_closed(self, deadline: float) -> bool:
        """Returns whether all breakers close in time. That takes requests, which the load sends."""
        while time.monotonic() < deadline:
            services = (await self.metrics()).values()
            states = [value for samples in services for name, value in samples.items() if name.startswith(BREAKER_STATE)]
            if states and not any(states):
                return True
            await asyncio.sleep(_POLL_S)
        return False


@asynccontextmanager
async def staged(layout: ClusterLayout, network: HostNetwork | None, num_clients: int, seed: str) -> AsyncIterator[Stage]:
    """A stage whose answers are always alike. On exit it leaves nothing behind.

    Raises ServiceFailedError if it does not start.
    """
    async with AsyncExitStack() as stack:
        directory = Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="ryzanstein-chaos-", ignore_cleanup_errors=True))
        )
        planned = plan(layout, network, directory)
        stack.callback(planned.remove_hosts)
        for disk in filter(None, (planned.disk, planned.pages_disk)):
            stack.enter_context(disk)
        for child in planned.children:
            stack.callback(child.kill)
            child.start()
        # Started in this thread, which lives as long as the processes should; nothing else runs
        # yet.
        cluster = stack.enter_context(LocalCluster(planned.spec))
        load = ClientLoad([_router(cluster, name) for name in cluster.router_names], _questions(layout), num_clients, seed)
        logs = LogReader({name: service.log_path for name, service in cluster.services.items()})
        stage = Stage(planned, cluster, load, logs)
        await stage.ask_undisturbed()
        running = asyncio.create_task(load.run())
        stack.push_async_callback(_ended, running)
        yield stage


def _questions(layout: ClusterLayout) -> tuple[LoadQuestion, ...]:
    if layout.further_models:
        return questions_to(MODEL_DIR.name, layout.further_models)
    if layout.adapters:
        return questions_to_adapters(layout.adapters)
    if layout.forms:
        return FORM_QUESTIONS
    if layout.context:
        return PATIENT_QUESTIONS
    if layout.servers:
        return SERVER_QUESTIONS
    return LONG_QUESTIONS if layout.step_s else QUESTIONS


async def _ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait([task])


def _router(cluster: LocalCluster, name: str) -> RouterAddress:
    host, port = split_address(cluster.http_url_of(name).removeprefix("http://"))
    return RouterAddress(cluster.services[name].grpc_address, host, port, cluster.spec.api_key)
