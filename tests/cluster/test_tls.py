"""A cluster whose services talk with TLS alone: who gets in, what the wire shows, what new certificates cost."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from ryzanstein.auth.peers.authority import Authority
from ryzanstein.auth.peers.material import fingerprint_of
from ryzanstein.auth.peers.peer import DEFAULT_TRUST, Peer, PeerRole
from ryzanstein.cli.processes.cluster import ORCHESTRATOR, ClusterSpec, LocalCluster
from ryzanstein.cli.processes.ports import free_ports
from ryzanstein.cli.processes.service_process import ServiceProcess
from ryzanstein.demo import MODEL_DIR
from ryzanstein.v1 import inference_pb2 as inference
from ryzanstein.v1 import orchestrator_pb2, pages_pb2, worker_pb2
from ryzanstein.v1.inference_pb2_grpc import InferenceServiceStub
from ryzanstein.v1.orchestrator_pb2_grpc import OrchestratorServiceStub
from ryzanstein.v1.pages_pb2_grpc import PageServiceStub
from ryzanstein.v1.worker_pb2_grpc import WorkerServiceStub

pytestmark = pytest.mark.cluster

NODE_0, NODE_1, ROUTER = Peer(PeerRole.NODE, "node-0"), Peer(PeerRole.NODE, "node-1"), Peer(PeerRole.ROUTER, "router-0")
OPERATOR, MONITOR = Peer(PeerRole.OPERATOR, "me"), Peer(PeerRole.MONITOR, "prometheus")
SECRET = "pomegranate"
CALL_S = 30.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    state = tmp_path_factory.mktemp("secure")
    with LocalCluster(ClusterSpec(MODEL_DIR, num_nodes=2, tp=1, secure=True, state_dir=state)) as started:
        yield started


@dataclass
class Wire:
    """What a stranger has: the CA that the cluster trusts, and certificates of its own choice."""

    authority: Authority

    def channel(self, address: str, own: Peer | None, expect: Peer, *, issuer: Authority | None = None) -> grpc.Channel:
        """Returns a channel with the certificate of a peer; of another CA if one is given."""
        pair: tuple[Any, Any] = (None, None)
        if own is not None:
            issued = (issuer or self.authority).issue(own)
            pair = (issued.key, issued.certificate)
        credentials = grpc.ssl_channel_credentials(self.authority.certificate, *pair)
        options = (
            ("grpc.ssl_target_name_override", expect.server_name(DEFAULT_TRUST)),
            ("grpc.use_local_subchannel_pool", 1),
        )
        return grpc.secure_channel(address, credentials, options)


@pytest.fixture(scope="module")
def wire(cluster: LocalCluster) -> Wire:
    return Wire(Authority.open(cluster.state_dir / "tls"))


def chat(address: str, text: str = "Count from 1 to 9.", **sampling: Any) -> str:
    with grpc.insecure_channel(address, (("grpc.use_local_subchannel_pool", 1),)) as channel:
        message = inference.Message(role=inference.ROLE_USER, content=text)
        params = inference.SamplingParams(**{"temperature": 0.0, **sampling})
        request = inference.ChatRequest(messages=[message], sampling=params)
        return InferenceServiceStub(channel).Chat(request, timeout=30).choices[0].text


def refusal(call: Callable[[], Any]) -> tuple[str, str]:
    """Returns the code and the text of what a call fails with."""
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return caught.value.code().name, str(caught.value.details())


def metric(cluster: LocalCluster, service: str, name: str) -> dict[str, float]:
    """Returns the samples of a metric by their labels."""
    lines = httpx.get(cluster.services[service].metrics_url, trust_env=False).text.splitlines()
    found = [line.rpartition(" ") for line in lines if line.startswith(name)]
    return {labels.removeprefix(name): float(value) for labels, _, value in found}


def until(holds: Callable[[], bool], timeout_s: float = 10.0) -> float:
    """Waits until something holds, and returns how long it took."""
    started = time.monotonic()
    while not holds():
        assert time.monotonic() < started + timeout_s, "it never came true"
        time.sleep(0.02)
    return time.monotonic() - started


def links(cluster: LocalCluster) -> dict[str, float]:
    found = metric(cluster, "router-0", "ryzanstein_router_link_up")
    return {labels.split('"')[1]: value for labels, value in found.items()}


def test_a_chat_is_answered_and_operators_see_and_drain_with_their_certificate(cluster: LocalCluster) -> None:
    assert chat(cluster.router_address) == "1 2 3 4 5 6 7 8 9"
    body = {"messages": [{"role": "user", "content": "Count from 1 to 9."}]}
    answer = httpx.post(f"{cluster.http_url}/v1/chat/completions", json=body, timeout=30, trust_env=False).json()
    assert answer["choices"][0]["message"]["content"] == "1 2 3 4 5 6 7 8 9"

    def command(*arguments: str, tls_dir: Path | None = cluster.tls_dir) -> subprocess.CompletedProcess[str]:
        env = {name: value for name, value in os.environ.items() if name != "RYZANSTEIN_TLS_DIR"}
        env |= {} if tls_dir is None else {"RYZANSTEIN_TLS_DIR": str(tls_dir)}
        where = ["--orchestrator", cluster.orchestrator_address]
        program = [sys.executable, "-P", "-m", "ryzanstein.cli", arguments[0], *where, *arguments[1:]]
        return subprocess.run(program, env=env, capture_output=True, text=True, timeout=60, check=False)

    status = command("status", "--router", cluster.router_address, "--json")
    assert status.returncode == 0, status.stderr
    nodes = json.loads(status.stdout)["nodes"]
    assert [(node["node"]["node_id"], node["node"]["state"], bool(node["ranks"])) for node in nodes] == [
        ("node-0", "READY", True),
        ("node-1", "READY", True),
    ]
    assert command("drain", "node-0", "--force", tls_dir=None).returncode == 1
    assert command("drain", "node-0", "--force").returncode == 0
    assert command("undrain", "node-0").returncode == 0
    assert command("deploy", "--list").returncode == 0


@pytest.mark.parametrize("service", [ORCHESTRATOR, "node-0"])
def test_a_client_without_tls_gets_nothing(cluster: LocalCluster, service: str) -> None:
    address = cluster.services[service].grpc_address
    with grpc.insecure_channel(address) as channel:
        for call in (
            lambda: OrchestratorServiceStub(channel).ListNodes(orchestrator_pb2.ListNodesRequest(), timeout=CALL_S),
            lambda: WorkerServiceStub(channel).GetStatus(worker_pb2.GetStatusRequest(), timeout=CALL_S),
        ):
            assert refusal(call)[0] == "UNAVAILABLE"
    host, port = address.split(":")
    with socket.create_connection((host, int(port)), timeout=5) as raw:
        raw.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        answer = raw.recv(4096)
    assert b"grpc" not in answer.lower()
    assert not answer or answer[0] == 0x15, "a TLS alert, or nothing"


@pytest.mark.parametrize(
    ("own", "says", "why"),
    [
        (None, "evil", "UNAVAILABLE"),
        (ROUTER, "router-0", "may not call"),
        (OPERATOR, "me", "may not call"),
        (Peer(PeerRole.NODE, "evil"), "node-0", "not the name"),
    ],
)
def test_a_fake_node_is_not_registered(cluster: LocalCluster, wire: Wire, own: Peer | None, says: str, why: str) -> None:
    with wire.channel(cluster.orchestrator_address, own, Peer(PeerRole.ORCHESTRATOR)) as channel:
        stub = OrchestratorServiceStub(channel)
        node = orchestrator_pb2.Node(node_id=says, address="127.0.0.1:1", tls_address="127.0.0.1:1", incarnation="x", tp=1)
        assert why in " ".join(
            refusal(lambda: stub.RegisterNode(orchestrator_pb2.RegisterNodeRequest(node=node), timeout=CALL_S))
        )
        beats = iter([orchestrator_pb2.HeartbeatRequest(node_id=says)])
        assert why in " ".join(refusal(lambda: next(stub.Heartbeat(beats, timeout=CALL_S))))
        leave = orchestrator_pb2.LeaveNodeRequest(node_id=says, lease_id="x")
        assert why in " ".join(refusal(lambda: stub.LeaveNode(leave, timeout=CALL_S)))
    assert set(links(cluster)) == {"node-0", "node-1"}


@pytest.mark.parametrize("own", [NODE_1, OPERATOR, MONITOR, Peer(PeerRole.ROUTER, "another"), None])
def test_a_fake_router_gets_no_stream_and_no_pages(cluster: LocalCluster, wire: Wire, own: Peer | None) -> None:
    with wire.channel(cluster.services["node-0"].grpc_address, own, NODE_0) as channel:
        hello = worker_pb2.ConnectRequest(hello=worker_pb2.RouterHello(router_id="router-0"))
        code, text = refusal(lambda: next(WorkerServiceStub(channel).Connect(iter([hello]), timeout=CALL_S)))
        expected = "not the name" if own is not None and own.role is PeerRole.ROUTER else "may not call"
        assert (code, expected in text) == (("PERMISSION_DENIED", True) if own is not None else ("UNAVAILABLE", False))
        offer = pages_pb2.OfferPagesRequest()
        code, text = refusal(lambda: PageServiceStub(channel).OfferPages(offer, timeout=CALL_S))
        if own == NODE_1:
            assert "may not call" not in text, "nodes send each other pages"
        else:
            assert code in ("PERMISSION_DENIED", "UNAVAILABLE")
        load = worker_pb2.LoadModelRequest(path="")
        code, _ = refusal(lambda: WorkerServiceStub(channel).LoadModel(load, timeout=CALL_S))
        assert code == ("INVALID_ARGUMENT" if own == OPERATOR else "PERMISSION_DENIED" if own else "UNAVAILABLE")


class Impostor:
    """Something that answers as a node does, with any certificate, and keeps what it is sent."""

    def __init__(self, says: str, pair: tuple[bytes, bytes] | None, roots: bytes) -> None:
        from concurrent.futures import ThreadPoolExecutor

        self.frames: list[bytes] = []
        self._server = grpc.server(ThreadPoolExecutor(4))
        self._server.add_generic_rpc_handlers((self._handler(says),))
        if pair is None:
            self.port = self._server.add_insecure_port("127.0.0.1:0")
        else:
            credentials = grpc.ssl_server_credentials([pair], roots, require_client_auth=True)
            self.port = self._server.add_secure_port("127.0.0.1:0", credentials)

    def _handler(self, says: str) -> grpc.GenericRpcHandler:
        def status(request: bytes, context: Any) -> bytes:
            self.frames.append(request)
            return worker_pb2.GetStatusResponse(node_id=says).SerializeToString()

        def connect(requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
            beat = worker_pb2.Beat(state=worker_pb2.NODE_STATE_READY, model="demo", context_length=2048)
            for request in requests:
                self.frames.append(request)
                hello = worker_pb2.NodeHello(node_id=says, incarnation="fake", beat=beat)
                yield worker_pb2.ConnectResponse(hello=hello).SerializeToString()

        methods = {
            "GetStatus": grpc.unary_unary_rpc_method_handler(status),
            "Connect": grpc.stream_stream_rpc_method_handler(connect),
        }
        return grpc.method_handlers_generic_handler("ryzanstein.v1.WorkerService", methods)

    @property
    def prompts(self) -> int:
        return sum(SECRET.encode() in frame for frame in self.frames)

    def __enter__(self) -> Impostor:
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop(0).wait()


@contextmanager
def router(wire: Wire, folder: Path, nodes: list[str], *, secure: bool = True) -> Iterator[ServiceProcess]:
    """Runs one more router, which dials these addresses."""
    grpc_port, http_port, metrics_port = free_ports(3)
    flags: dict[str, Any] = {
        "router_id": "router-x",
        "grpc_port": grpc_port,
        "http_port": http_port,
        "metrics_port": metrics_port,
    }
    flags |= {"nodes": ",".join(nodes), "state_dir": str(folder / "state"), "session_store": "memory"}
    if secure:
        wire.authority.write(Peer(PeerRole.ROUTER, "router-x"), folder / "tls")
        flags |= {"tls": "require", "tls_dir": str(folder / "tls"), "tls_port": 0}
    process = ServiceProcess("router-x", "router", flags, (), folder / "router-x.log")
    folder.mkdir(exist_ok=True)
    process.start()
    try:
        until(lambda: process.serves(""), 30)
        yield process
    finally:
        process.kill()


def test_no_prompt_reaches_a_node_that_is_not_the_one_that_it_says(cluster: LocalCluster, wire: Wire, tmp_path: Path) -> None:
    foreign = Authority.new(DEFAULT_TRUST)

    def pair(authority: Authority, peer: Peer, **more: Any) -> tuple[bytes, bytes]:
        issued = authority.issue(peer, **more)
        return issued.key, issued.certificate

    evil = Peer(PeerRole.NODE, "evil")
    fakes = {
        "plaintext": Impostor("node-0", None, b""),
        "foreign CA": Impostor("node-0", pair(foreign, NODE_0), wire.authority.certificate),
        "a router's certificate": Impostor("node-0", pair(wire.authority, ROUTER), wire.authority.certificate),
        "expired": Impostor("node-0", pair(wire.authority, NODE_0, life=timedelta(seconds=-1)), wire.authority.certificate),
        "another node's id": Impostor("node-0", pair(wire.authority, evil), wire.authority.certificate),
    }
    with ExitStack() as stack:
        addresses = [f"127.0.0.1:{stack.enter_context(fake).port}" for fake in fakes.values()]
        real = cluster.services["node-0"].grpc_address
        process = stack.enter_context(router(wire, tmp_path, [*addresses, real]))
        until(process.serves, 20)
        for _ in range(100):
            assert chat(process.grpc_address, f"Say {SECRET}.", max_tokens=1) is not None
        lines = httpx.get(process.metrics_url, trust_env=False).text
    assert {name: fake.prompts for name, fake in fakes.items()} == dict.fromkeys(fakes, 0)
    assert {name for name, fake in fakes.items() if fake.frames} == {"another node's id"}, "the handshake refuses the rest"
    assert 'breaker_state{node_id="node-0"} 0.0' in lines


@dataclass
class Recorder:
    """A TCP proxy that keeps what passes."""

    target: int
    seen: bytearray = field(default_factory=bytearray)
    sent: bytearray = field(default_factory=bytearray)
    """What came from whoever dialled."""
    port: int = 0

    def __enter__(self) -> Recorder:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(("127.0.0.1", self.target))
            except OSError:
                near.close()
                continue
            for one, other, seen in ((near, far, self.sent), (far, near, bytearray())):
                threading.Thread(target=self._pump, args=(one, other, seen), daemon=True).start()

    def _pump(self, one: socket.socket, other: socket.socket, seen: bytearray) -> None:
        try:
            while data := one.recv(65536):
                self.seen += data
                seen += data
                other.sendall(data)
        except OSError:
            pass
        finally:
            for each in (one, other):
                each.close()


def test_nobody_between_router_and_node_reads_a_prompt(cluster: LocalCluster, wire: Wire, tmp_path: Path) -> None:
    with Recorder(int(cluster.services["node-0"].grpc_address.split(":")[1])) as recorder:
        with router(wire, tmp_path / "a", [f"127.0.0.1:{recorder.port}"]) as process:
            until(process.serves, 20)
            chat(process.grpc_address, f"Say {SECRET}.", max_tokens=4)
        assert len(recorder.seen) > 2000
        assert SECRET.encode() not in recorder.seen


def test_what_removes_tls_from_the_way_gets_no_prompt(cluster: LocalCluster, wire: Wire, tmp_path: Path) -> None:
    """A node that answers without TLS; and a router without certificates, which is told so by its links."""
    with ExitStack() as stack:
        plain = stack.enter_context(Impostor("node-0", None, b""))
        recorder = stack.enter_context(Recorder(plain.port))
        process = stack.enter_context(router(wire, tmp_path / "a", [f"127.0.0.1:{recorder.port}"]))
        until(lambda: len(recorder.seen) > 100)
        time.sleep(1)
        assert not process.serves()
    assert plain.frames == []
    assert recorder.sent[0] == 0x16, "a TLS handshake"
    with (
        Impostor("node-0", None, b"") as plain,
        router(wire, tmp_path / "b", [f"127.0.0.1:{plain.port}"], secure=False),
    ):
        until(lambda: len(plain.frames) > 0)  # the same node and a router without TLS: the test can fail


def test_a_denied_router_loses_its_links_and_a_denied_node_its_work(cluster: LocalCluster, wire: Wire, tmp_path: Path) -> None:
    addresses = [cluster.services[name].grpc_address for name in ("node-0", "node-1")]
    with router(wire, tmp_path, addresses) as process:
        until(process.serves, 20)

        def up() -> dict[str, float]:
            lines = httpx.get(process.metrics_url, trust_env=False).text.splitlines()
            found = [line for line in lines if line.startswith("ryzanstein_router_link_up{")]
            return {line.split('"')[1]: float(line.split()[-1]) for line in found}

        until(lambda: up() == {"node-0": 1, "node-1": 1})
        # The router gives up a node that is denied by name.
        (tmp_path / "tls" / "denied").write_text("node/node-1\n")
        assert until(lambda: up().get("node-1") == 0) < 2.5
        assert chat(process.grpc_address, max_tokens=4)
        # A node gives up a router whose certificate is denied.
        digest = fingerprint_of((tmp_path / "tls" / "tls.crt").read_bytes())
        denied = cluster.state_dir / "tls" / "node-0" / "denied"
        denied.write_text(f"{digest}\n")
        try:
            assert until(lambda: up().get("node-0") == 0) < 2.5
            lines = httpx.get(process.metrics_url, trust_env=False).text
            assert 'link_losses_total{cause="not_trusted",node_id="node-0"} 1.0' in lines
            assert 'breaker_state{node_id="node-0"} 0.0' in lines
        finally:
            denied.unlink()
        until(lambda: up().get("node-0") == 1)
    assert chat(cluster.router_address) == "1 2 3 4 5 6 7 8 9", "the other router was never disturbed"


def test_a_second_process_cannot_take_the_id_of_a_node(cluster: LocalCluster, wire: Wire, tmp_path: Path) -> None:
    """It has a copy of the node's own certificate, and the orchestrator even believes its address."""
    shutil.copytree(cluster.state_dir / "tls" / "node-0", tmp_path / "tls")
    pair = ((tmp_path / "tls" / "tls.key").read_bytes(), (tmp_path / "tls" / "tls.crt").read_bytes())
    real = cluster.services["node-0"].grpc_address
    with ExitStack() as stack:
        door = stack.enter_context(Recorder(0))  # leads to the fake once the real node is linked
        fake = stack.enter_context(Impostor("node-0", pair, wire.authority.certificate))
        process = stack.enter_context(router(wire, tmp_path / "r", [real, f"127.0.0.1:{door.port}"]))
        until(process.serves, 20)
        door.target = fake.port
        until(lambda: "duplicate node id" in process.log_path.read_text())
        for _ in range(20):
            chat(process.grpc_address, f"Say {SECRET}.", max_tokens=1)
        assert fake.prompts == 0


class Askers:
    """Clients that ask without pause, and what they got."""

    def __init__(self, address: str, number: int = 2) -> None:
        self._address, self._stop = address, False
        self.answers, self.failures = 0, list[str]()
        self._threads = [threading.Thread(target=self._ask) for _ in range(number)]

    def __enter__(self) -> Askers:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop = True
        for thread in self._threads:
            thread.join()

    def _ask(self) -> None:
        while not self._stop:
            try:
                assert chat(self._address) == "1 2 3 4 5 6 7 8 9"
                self.answers += 1
            except (grpc.RpcError, AssertionError) as error:
                self.failures.append(repr(error))


@pytest.mark.long
@pytest.mark.timeout(120)
def test_certificates_change_each_second_under_streams_and_the_ca_in_three_steps(cluster: LocalCluster, wire: Wire) -> None:
    names = (ORCHESTRATOR, "node-0", "node-1", "router-0")
    folders = [cluster.state_dir / "tls" / name for name in (*names, "operator")]
    old, new = wire.authority, Authority.new(DEFAULT_TRUST)
    both = old.certificate + new.certificate
    before = {name: _descriptors(cluster.services[name].pid) for name in names}
    with Askers(cluster.router_address) as askers:
        for roots, issuer in [(both, old)] * 4 + [(both, new)] * 4 + [(new.certificate, new)] * 4:
            for folder in folders:
                (folder / "ca.crt").write_bytes(roots)
                issuer.write(issuer.peer_in(folder), folder, renew=True)
            time.sleep(1.1)
        # Links are made anew, with the new CA alone.
        cluster.services["node-1"].kill()
        cluster.services["node-1"].start()
        until(lambda: links(cluster).get("node-1") == 0)
        until(lambda: links(cluster).get("node-1") == 1, 30)
    assert askers.failures == []
    assert askers.answers > 20
    for name in (ORCHESTRATOR, "node-0", "router-0"):
        reloads = metric(cluster, name, f"ryzanstein_{cluster.services[name].kind}_tls_reloads_total")
        assert reloads['{outcome="ok"}'] >= 6
        assert _descriptors(cluster.services[name].pid) <= before[name] + 16


def _descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))
