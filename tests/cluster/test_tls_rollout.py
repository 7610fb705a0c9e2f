"""From no TLS to TLS alone and back, one process after the other, while clients stream: the steps of the components
tls-accept and tls, with the order that the pages give."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from ryzanstein.auth.peers.authority import Authority
from ryzanstein.auth.peers.peer import DEFAULT_TRUST, Peer, PeerRole
from ryzanstein.cli.processes.ports import free_ports
from ryzanstein.cli.processes.service_process import ServiceProcess, serves
from ryzanstein.demo import MODEL_DIR
from ryzanstein.v1 import inference_pb2 as inference
from ryzanstein.v1.inference_pb2_grpc import InferenceServiceStub

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.timeout(400)]

PEERS = {
    "orchestrator": Peer(PeerRole.ORCHESTRATOR),
    **{name: Peer(PeerRole.NODE, name) for name in ("node-0", "node-1")},
    "router-0": Peer(PeerRole.ROUTER, "router-0"),
}
KINDS = {PeerRole.ORCHESTRATOR: "orchestrator", PeerRole.NODE: "worker", PeerRole.ROUTER: "router"}
TOKENS = 40
REACHED_S = 60.0


class Services:
    """The processes of a cluster, of which each may be started anew with another `tls`, at the same ports."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        authority = Authority.new(DEFAULT_TRUST)
        for name, peer in PEERS.items():
            authority.write(peer, folder / name)
        names = ("grpc_port", "tls_port", "metrics_port", "health_port", "http_port")
        ports = iter(free_ports(len(PEERS) * len(names)))
        self.ports = {name: {port: next(ports) for port in names} for name in PEERS}
        self.running: dict[str, ServiceProcess] = {}

    def begin(self, name: str, tls: str) -> None:
        """Starts a service, or one that runs once it has drained, and returns when all is linked again."""
        if (before := self.running.get(name)) is not None:
            before.signal(signal.SIGTERM)
            assert before.wait_ended(40), f"{name} does not end"
            before.kill()
        role = PEERS[name].role
        flags: dict[str, Any] = {
            key: port for key, port in self.ports[name].items() if key != "http_port" or role is PeerRole.ROUTER
        }
        flags |= {"tls": tls, "drain_grace_s": 30} | ({} if tls == "off" else {"tls_dir": str(self.folder / name)})
        orchestrator = self.ports["orchestrator"]["grpc_port" if tls == "off" else "tls_port"]
        if role is PeerRole.ORCHESTRATOR:
            flags |= {"database": str(self.folder / "orchestrator.sqlite")}
        elif role is PeerRole.NODE:
            flags |= {"node_id": name, "orchestrator": f"127.0.0.1:{orchestrator}", "model": str(MODEL_DIR), "tp": 1}
        else:
            flags |= {
                "router_id": name,
                "orchestrator": f"127.0.0.1:{orchestrator}",
                "state_dir": str(self.folder / f"{name}-s"),
            }
        self.running[name] = ServiceProcess(name, KINDS[role], flags, (), self.folder / f"{name}.log")
        self.running[name].start()
        until(lambda: serves(f"127.0.0.1:{self.ports[name]['health_port']}"), f"{name} with {tls} is not ready")

    @property
    def router(self) -> str:
        """The address for clients."""
        return f"127.0.0.1:{self.ports['router-0']['grpc_port']}"

    def wait_linked(self) -> None:
        """Returns when the router has both nodes."""
        until(lambda: self._linked() == 2, "the router has not both nodes")

    def _linked(self) -> int:
        with grpc.insecure_channel(self.router, (("grpc.use_local_subchannel_pool", 1),)) as channel:
            try:
                models = InferenceServiceStub(channel).ListModels(inference.ListModelsRequest(), timeout=2).models
            except grpc.RpcError:
                return 0
        return sum(model.ready_nodes for model in models)

    def plaintext_calls(self, name: str) -> float:
        text = httpx.get(f"http://127.0.0.1:{self.ports[name]['metrics_port']}/metrics", trust_env=False).text
        return sum(float(line.split()[1]) for line in text.splitlines() if "_plaintext_calls_total " in line and line[0] != "#")

    def close(self) -> None:
        for service in self.running.values():
            service.kill()


def until(holds: Callable[[], bool], why: str) -> None:
    deadline = time.monotonic() + REACHED_S
    while not holds():
        assert time.monotonic() < deadline, why
        time.sleep(0.05)


@dataclass
class Clients:
    """Clients that stream all the time. One whose router takes no call at the moment tries again."""

    address: str
    finished: int = 0
    broken: list[str] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)

    def start(self) -> None:
        self._threads = [threading.Thread(target=self._run) for _ in range(2)]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)

    def _run(self) -> None:
        while not self._stop.wait(0.1):
            with grpc.insecure_channel(self.address, (("grpc.use_local_subchannel_pool", 1),)) as channel:
                self._ask(InferenceServiceStub(channel))

    def _ask(self, stub: Any) -> None:
        message = inference.Message(role=inference.ROLE_USER, content="Count from 1 to 60.")
        sampling = inference.SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
        request = inference.StreamChatRequest(chat=inference.ChatRequest(messages=[message], sampling=sampling))
        seen, begun = 0, False
        try:
            for response in stub.StreamChat(request, timeout=60):
                begun = True
                if response.event.HasField("delta"):
                    assert response.event.delta.first_index == seen, "a token was lost or repeated"
                    seen += len(response.event.delta.token_ids)
            assert seen == TOKENS
        except (grpc.RpcError, AssertionError) as failure:
            if begun or not isinstance(failure, grpc.RpcError) or failure.code() is not grpc.StatusCode.UNAVAILABLE:
                self.broken.append(str(failure))
            return
        self.finished += 1


@pytest.fixture
def services(tmp_path: Path) -> Iterator[Services]:
    made = Services(tmp_path)
    with closing(made):
        for name in PEERS:
            made.begin(name, "off")
        made.wait_linked()
        yield made


def test_no_answer_is_lost_on_the_way_to_tls_alone_and_back(services: Services) -> None:
    clients = Clients(services.router)
    with closing(clients):
        clients.start()
        for tls, order in (("accept", list(PEERS)), ("require", list(PEERS))):
            for name in order:
                services.begin(name, tls)
                services.wait_linked()
            if tls == "accept":
                before = {name: services.plaintext_calls(name) for name in PEERS}
                done = clients.finished
                until(lambda done=done: clients.finished >= done + 6, "no answers")
                assert {name: services.plaintext_calls(name) for name in PEERS} == before, "now all dial with TLS"
        for tls in ("accept", "off"):
            for name in reversed(PEERS):
                services.begin(name, tls)
                services.wait_linked()
    assert clients.broken == []
    assert clients.finished > 20
