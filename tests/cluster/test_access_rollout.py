"""TLS between the services and keys of clients, introduced and taken back one process at a time, under load."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from ryzanstein.addresses import join_address
from ryzanstein.auth.peers.peer import Peer, PeerRole
from ryzanstein.cli.access.certificates import LocalCertificates
from ryzanstein.cli.access.local_key import TENANT, LocalKey
from ryzanstein.cli.processes.ports import free_ports
from ryzanstein.cli.processes.service_process import ServiceProcess, wait_all_ready
from ryzanstein.demo import MODEL_DIR
from ryzanstein.lab.chaos.client_load import ClientLoad
from ryzanstein.lab.chaos.questions import QUESTIONS
from ryzanstein.lab.clients.judge import judge
from ryzanstein.lab.clients.reading import AnswerReading
from ryzanstein.lab.clients.transport import RouterAddress
from ryzanstein.rpc.client import PLAIN
from ryzanstein.v1 import inference_pb2 as inference
from ryzanstein.v1.inference_pb2_grpc import InferenceServiceStub

pytestmark = [pytest.mark.cluster, pytest.mark.lab]

ORCHESTRATOR, NODES, ROUTERS = "orchestrator", ("node-0", "node-1"), ("router-0", "router-1")
NAMES = (ORCHESTRATOR, *NODES, *ROUTERS)
PLAINTEXT_CALLS = "ryzanstein_{}_plaintext_calls_total"


class KeyedRouter(RouterAddress):
    """A router whose clients send their key, and name their tenant as they did before there were keys."""

    @property
    def credential(self) -> dict[str, str]:
        return {**super().credential, "x-tenant-id": TENANT}


@dataclass
class Rollout:
    """A cluster whose processes are replaced one by one: `tls` and `auth` are by their names."""

    state: Path
    tls: dict[str, str] = field(default_factory=lambda: dict.fromkeys(NAMES, "off"))
    auth: dict[str, str] = field(default_factory=lambda: dict.fromkeys(ROUTERS, "off"))

    def __post_init__(self) -> None:
        self.certificates, self.key = LocalCertificates(self.state / "tls"), LocalKey.kept(self.state)
        ports = iter(free_ports(4 * len(NAMES)))
        self.ports = {name: {kind: next(ports) for kind in ("grpc", "tls", "metrics", "http")} for name in NAMES}
        self.processes: dict[str, ServiceProcess] = {}

    def addresses(self) -> list[RouterAddress]:
        return [
            KeyedRouter(f"127.0.0.1:{self.ports[name]['grpc']}", "127.0.0.1", self.ports[name]["http"], self.key.key)
            for name in ROUTERS
        ]

    def process(self, name: str) -> ServiceProcess:
        ports, mode = self.ports[name], self.tls[name]
        kind = {"o": "orchestrator", "n": "worker", "r": "router"}[name[0]]
        flags: dict[str, Any] = {"grpc_port": ports["grpc"], "metrics_port": ports["metrics"], "tls": mode}
        if mode != "off":
            peer = (
                Peer(PeerRole.ORCHESTRATOR)
                if name == ORCHESTRATOR
                else Peer(PeerRole[name.split("-", maxsplit=1)[0].upper()], name)
            )
            flags |= {"tls_dir": str(self.certificates.folder(name, peer)), "tls_port": ports["tls"]}
        flags |= getattr(self, f"_{kind}")(name, mode)
        dialer = PLAIN
        if mode == "require" and kind != "router":  # a router's public port has certificates of its own, or none
            dialer, flags["grpc_port"] = self.certificates.dialer(), ports["tls"]  # where the process is asked for its health
        return ServiceProcess(name, kind, flags, (), self.state / f"{name}.log", dialer=dialer)

    def _orchestrator(self, name: str, mode: str) -> dict[str, Any]:
        return {"database": str(self.state / "orchestrator.sqlite")}

    def _worker(self, name: str, mode: str) -> dict[str, Any]:
        model = {"model": str(MODEL_DIR), "tp": 1, "threads_per_rank": 1, "device": "cpu"}
        return {"node_id": name, "orchestrator": self._orchestrator_for(mode), "drain_grace_s": 5, **model}

    def _router(self, name: str, mode: str) -> dict[str, Any]:
        flags = {"router_id": name, "http_port": self.ports[name]["http"], "orchestrator": self._orchestrator_for(mode)}
        flags |= {"state_dir": str(self.state / name), "session_dir": str(self.state), "drain_grace_s": 5, "peer_port": 0}
        auth = self.auth[name]
        return flags | {"auth": auth} | ({"keys_file": str(self.key.keys_file)} if auth != "off" else {})

    def _orchestrator_for(self, mode: str) -> str:
        return join_address("127.0.0.1", self.ports[ORCHESTRATOR]["grpc" if mode == "off" else "tls"])

    def replace(self, name: str) -> None:
        """Ends a process as a rolling update does, starts the next one, and waits until both routers see both nodes."""
        if name in self.processes:
            self.processes[name].signal(signal.SIGTERM)
            assert self.processes[name].wait_ended(20), name
            self.processes[name].kill()
        self.processes[name] = self.process(name)
        self.processes[name].start()
        if len(self.processes) == len(NAMES):
            self.wait_whole()

    def wait_whole(self) -> None:
        deadline = time.monotonic() + 60
        wait_all_ready(list(self.processes.values()), deadline)
        for router in self.addresses():
            while (seen := self._nodes(router)) != len(NODES):
                assert time.monotonic() < deadline, f"{router.grpc} sees {seen} nodes"
                time.sleep(0.05)

    def _nodes(self, router: RouterAddress) -> int:
        with grpc.insecure_channel(router.grpc, (("grpc.use_local_subchannel_pool", 1),)) as channel:
            stub = InferenceServiceStub(channel)
            try:
                models = stub.ListModels(inference.ListModelsRequest(), timeout=2, metadata=tuple(router.credential.items()))
            except grpc.RpcError:
                return 0
        return min((model.ready_nodes for model in models.models), default=0)

    def metric(self, name: str, metric: str) -> float:
        kind = {"o": "orchestrator", "n": "worker", "r": "router"}[name[0]]
        lines = httpx.get(self.processes[name].metrics_url, trust_env=False).text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(metric.format(kind)))


@contextmanager
def started(state: Path) -> Iterator[Rollout]:
    rollout = Rollout(state)
    try:
        for name in NAMES:
            rollout.replace(name)
        yield rollout
    finally:
        for process in rollout.processes.values():
            process.kill()


@pytest.mark.timeout(580)
def test_tls_and_keys_come_and_go_one_process_at_a_time_without_a_lost_token(tmp_path: Path) -> None:
    with started(tmp_path) as rollout:
        asyncio.run(_roll(rollout))


async def _roll(rollout: Rollout) -> None:
    load = ClientLoad(rollout.addresses(), QUESTIONS, 4, "rollout")
    undisturbed: dict[tuple[str, int], AnswerReading] = {}
    for question in QUESTIONS:
        for reading in await load.ask(question):
            assert not reading.failure, reading.failure
            undisturbed[reading.kind, reading.turn] = reading
    running = asyncio.create_task(load.run())
    load.set_width(4)
    try:
        await _each_step(rollout)
        load.set_width(0)
        assert await load.until_ended(load.under_way, 60)
    finally:
        running.cancel()
        await asyncio.wait([running])
    flawed = [(reading.kind, reading.turn, reading.failure, verdict) for reading in load.ended if not (
        verdict := judge(undisturbed[reading.kind, reading.turn], reading)).flawless]  # fmt: skip
    assert flawed == []
    assert len(load.ended) > 100


async def _each_step(rollout: Rollout) -> None:
    async def tls(mode: str, *names: str) -> None:
        for name in names:
            rollout.tls[name] = mode
            await asyncio.to_thread(rollout.replace, name)

    async def auth(mode: str) -> None:
        for name in ROUTERS:
            rollout.auth[name] = mode
            await asyncio.to_thread(rollout.replace, name)

    await tls("accept", ORCHESTRATOR, *NODES)
    assert rollout.metric("node-0", PLAINTEXT_CALLS) > 0, "the routers come without TLS"
    await tls("accept", *ROUTERS)
    before = {name: rollout.metric(name, PLAINTEXT_CALLS) for name in NODES}
    await asyncio.sleep(2)
    assert {name: rollout.metric(name, PLAINTEXT_CALLS) for name in NODES} == before, "now they come with TLS"
    await tls("require", *ROUTERS, *NODES, ORCHESTRATOR)
    await auth("optional")
    await auth("required")
    await auth("optional")
    await auth("off")
    await tls("accept", ORCHESTRATOR, *NODES, *ROUTERS)
    await tls("off", *ROUTERS, *NODES, ORCHESTRATOR)
