"""Servers and channels with TLS, over real sockets: who is admitted, and what happens when certificates change."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client import CollectorRegistry

from ryzanstein.auth.peers.authority import Authority
from ryzanstein.auth.peers.material import LiveMaterial, fingerprint_of
from ryzanstein.auth.peers.metrics import TlsMetrics
from ryzanstein.auth.peers.peer import DEFAULT_TRUST, Peer, PeerRole, check_name
from ryzanstein.auth.peers.rules import PEER_RULES
from ryzanstein.errors import RyzansteinError
from ryzanstein.rpc.client import PLAIN, Dialer
from ryzanstein.rpc.http2.call_end import CallEnd, CallFailedError
from ryzanstein.rpc.server import RpcServer
from ryzanstein.rpc.status import answered
from ryzanstein.rpc.tls.service_tls import ServiceTls
from ryzanstein.v1 import adapter_pb2, debug_pb2, embedding_pb2, orchestrator_pb2, pages_pb2, peer_pb2, text_pb2, worker_pb2
from ryzanstein.v1.orchestrator_pb2_grpc import (
    OrchestratorServiceServicer,
    OrchestratorServiceStub,
    add_OrchestratorServiceServicer_to_server,
)

ORCHESTRATOR = Peer(PeerRole.ORCHESTRATOR)
ROUTER, NODE, OPERATOR = Peer(PeerRole.ROUTER, "r-1"), Peer(PeerRole.NODE, "n-1"), Peer(PeerRole.OPERATOR, "me")
FULL = grpc.StatusCode


class Servicer(OrchestratorServiceServicer):
    """Answers what the tests call."""

    async def RegisterNode(self, request: orchestrator_pb2.RegisterNodeRequest, context: Any) -> Any:
        check_name(request.node.node_id)
        return orchestrator_pb2.RegisterNodeResponse(lease_id="lease")

    async def ListNodes(self, request: Any, context: Any) -> Any:
        return orchestrator_pb2.ListNodesResponse()

    async def DeployModel(self, request: Any, context: Any) -> Any:
        return orchestrator_pb2.DeployModelResponse()

    async def WatchCluster(self, request: Any, context: Any) -> AsyncIterator[Any]:
        while True:
            yield orchestrator_pb2.WatchClusterResponse()
            await asyncio.sleep(0.01)


@dataclass
class World:
    """A CA, a server, and how to become a client of it."""

    authority: Authority
    folder: Path
    server: RpcServer
    tls: ServiceTls
    registry: CollectorRegistry

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server.tls_port}"

    def dialer(self, peer: Peer, authority: Authority | None = None) -> Dialer:
        """Returns a client's dialler, which trusts the server's CA whoever issued its own certificate."""
        folder = self.folder / f"{peer.role}-{time.monotonic_ns()}"
        (authority or self.authority).write(peer, folder)
        material = live(folder)
        trusted = material.current.roots + self.authority.certificate
        object.__setattr__(material.current, "roots", trusted)
        return Dialer(material)

    async def refresh(self) -> None:
        await self.tls.material.look()

    def value(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(f"ryzanstein_test_{name}", labels) or 0.0


def live(folder: Path, registry: CollectorRegistry | None = None) -> LiveMaterial:
    return LiveMaterial(folder, DEFAULT_TRUST, TlsMetrics("test", registry or CollectorRegistry()))


@asynccontextmanager
async def serving(
    folder: Path, *, required: bool = True, authority: Authority | None = None, builtin: bool = True
) -> AsyncIterator[World]:
    authority, registry = authority or Authority.new(DEFAULT_TRUST), CollectorRegistry()
    authority.write(ORCHESTRATOR, folder / "server")
    tls = ServiceTls.open(folder / "server", DEFAULT_TRUST, ORCHESTRATOR, TlsMetrics("test", registry))
    tls.required = required
    server = RpcServer("127.0.0.1", 0, ["ryzanstein.v1.OrchestratorService"], tls=tls, builtin=builtin)
    add_OrchestratorServiceServicer_to_server(Servicer(), server.server)
    await server.start()
    try:
        yield World(authority, folder, server, tls, registry)
    finally:
        await server.stop(0)


@pytest.fixture(params=[True, False], ids=["builtin", "grpcio"])
async def world(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[World]:
    async with serving(tmp_path, builtin=request.param) as world:
        yield world


async def list_nodes(dialer: Dialer, address: str, expect: Peer = ORCHESTRATOR) -> None:
    async with dialer.open(address, expect, retries=False) as channel:
        await OrchestratorServiceStub(channel).ListNodes(orchestrator_pb2.ListNodesRequest(), timeout=5)


async def code_of(dialer: Dialer, address: str, expect: Peer = ORCHESTRATOR) -> grpc.StatusCode:
    """Returns how a call ends, the same over a channel of gRPC and over a connection of our own."""
    code = FULL.OK
    try:
        await list_nodes(dialer, address, expect)
    except grpc.aio.AioRpcError as error:
        code = error.code()
    assert (await code_of_stream(dialer, address, expect)) is code
    return code


async def code_of_stream(dialer: Dialer, address: str, expect: Peer) -> grpc.StatusCode:
    watching = Watching()
    try:
        stream = await dialer.open_stream(address, expect, "/ryzanstein.v1.OrchestratorService/WatchCluster", watching)
    except CallFailedError as error:
        return error.end.code
    with contextlib.suppress(RuntimeError):  # a server that closes at once
        stream.send(orchestrator_pb2.WatchClusterRequest().SerializeToString())
    try:
        return await asyncio.wait_for(watching.code, 5)
    finally:
        stream.close()


class Watching:
    """Receives a stream's first message, or its end."""

    def __init__(self) -> None:
        self.code: asyncio.Future[grpc.StatusCode] = asyncio.get_running_loop().create_future()

    def message(self, data: bytes) -> None:
        if not self.code.done():
            self.code.set_result(FULL.OK)

    def writable(self) -> None:
        pass

    def ended(self, end: CallEnd) -> None:
        if not self.code.done():
            self.code.set_result(end.code)


async def read_to_its_end(stream: Any) -> None:
    while True:
        await stream.read()


async def refusal(call: Any) -> str:
    with pytest.raises(RyzansteinError) as caught:
        await answered(call)
    assert caught.value.code.name == "PERMISSION_DENIED"
    return caught.value.reason


def test_the_table_has_every_method_between_services_and_no_other() -> None:
    files = (adapter_pb2, orchestrator_pb2, worker_pb2, pages_pb2, text_pb2, embedding_pb2, peer_pb2, debug_pb2)
    services = [service for file in files for service in file.DESCRIPTOR.services_by_name.values()]
    methods = {f"/{service.full_name}/{method.name}" for service in services for method in service.methods}
    others = {f"/ryzanstein.v1.InferenceService/{name}Generation" for name in ("Attach", "Cancel")}
    assert {method for method in PEER_RULES if method.startswith("/ryzanstein.")} == methods | others
    assert all(need.roles for need in PEER_RULES.values())
    assert PeerRole.OPERATOR not in PEER_RULES["/ryzanstein.v1.WorkerService/Connect"].roles


async def test_a_peer_of_the_right_role_is_admitted_and_others_are_refused(world: World) -> None:
    await list_nodes(world.dialer(ROUTER), world.address)
    async with world.dialer(ROUTER).open(world.address, ORCHESTRATOR) as channel:
        stub = OrchestratorServiceStub(channel)
        assert await refusal(stub.DeployModel(orchestrator_pb2.DeployModelRequest())) == "ROLE_NOT_ALLOWED"
        register = orchestrator_pb2.RegisterNodeRequest(node=orchestrator_pb2.Node(node_id="r-1"))
        assert await refusal(stub.RegisterNode(register)) == "ROLE_NOT_ALLOWED"
    async with world.dialer(OPERATOR).open(world.address, ORCHESTRATOR) as channel:
        await OrchestratorServiceStub(channel).DeployModel(orchestrator_pb2.DeployModelRequest())
    method = "/ryzanstein.v1.OrchestratorService/DeployModel"
    assert world.value("peer_refused_total", role="router", method=method) == 1


async def test_a_node_registers_under_the_name_in_its_certificate_alone(world: World) -> None:
    async with world.dialer(NODE).open(world.address, ORCHESTRATOR) as channel:
        stub = OrchestratorServiceStub(channel)
        for node_id in ("n-1", "n-2"):
            call = stub.RegisterNode(orchestrator_pb2.RegisterNodeRequest(node=orchestrator_pb2.Node(node_id=node_id)))
            if node_id == "n-1":
                assert (await call).lease_id == "lease"
            else:
                assert await refusal(call) == "NOT_YOUR_NAME"
    assert world.value("peer_refused_total", role="node", method="/ryzanstein.v1.OrchestratorService/RegisterNode") == 1


async def test_who_has_no_certificate_of_the_ca_reaches_no_handler(world: World) -> None:
    assert await code_of(PLAIN, world.address) is FULL.UNAVAILABLE
    foreign = world.dialer(ROUTER, Authority.new(DEFAULT_TRUST))
    assert await code_of(foreign, world.address) is FULL.UNAVAILABLE
    expired = world.authority.issue(ROUTER, life=timedelta(seconds=-1))
    for chain in ((expired.key, expired.certificate), (None, None)):
        credentials = grpc.ssl_channel_credentials(world.authority.certificate, *chain)
        options = (("grpc.ssl_target_name_override", ORCHESTRATOR.server_name(DEFAULT_TRUST)),)
        async with grpc.aio.secure_channel(world.address, credentials, options) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await OrchestratorServiceStub(channel).ListNodes(orchestrator_pb2.ListNodesRequest(), timeout=5)
            assert caught.value.code() is FULL.UNAVAILABLE


async def test_the_ca_of_a_cluster_may_have_an_issuer_that_no_service_knows(tmp_path: Path) -> None:
    root, issuing = Authority.new("corporate.internal"), Authority.new(DEFAULT_TRUST)
    key = root._key
    name = root._certificate.subject
    builder = x509.CertificateBuilder(name, issuing._certificate.subject, issuing._key.public_key(), 7)
    builder = builder.not_valid_before(issuing._certificate.not_valid_before_utc)
    builder = builder.not_valid_after(issuing._certificate.not_valid_after_utc)
    for extension in issuing._certificate.extensions:
        builder = builder.add_extension(extension.value, extension.critical)
    issuing._certificate = builder.sign(key, hashes.SHA256())
    async with serving(tmp_path, authority=issuing) as world:
        assert await code_of(world.dialer(ROUTER), world.address) is FULL.OK


async def test_a_comment_in_another_alphabet_beside_the_ca_hides_nothing(world: World) -> None:
    dialer = world.dialer(ROUTER)
    object.__setattr__(dialer._certificates.current, "roots", "# für alle\n".encode() + world.authority.certificate)  # type: ignore[union-attr]
    assert await code_of_stream(dialer, world.address, ORCHESTRATOR) is FULL.OK


@pytest.mark.parametrize("expect", [Peer(PeerRole.NODE), Peer(PeerRole.NODE, "n-1"), Peer(PeerRole.ROUTER)])
async def test_a_client_sends_nothing_to_a_server_that_is_not_the_one_that_it_means(world: World, expect: Peer) -> None:
    assert await code_of(world.dialer(ROUTER), world.address, expect) is FULL.UNAVAILABLE
    assert world.value("peer_refused_total", role="router", method="other") == 0


async def test_an_unknown_uri_in_a_good_certificate_is_no_identity(world: World) -> None:
    other = Authority.new("other.internal")
    other._key, other._certificate = world.authority._key, world.authority._certificate
    issued = other.issue(OPERATOR)
    credentials = grpc.ssl_channel_credentials(world.authority.certificate, issued.key, issued.certificate)
    options = (("grpc.ssl_target_name_override", ORCHESTRATOR.server_name(DEFAULT_TRUST)),)
    async with grpc.aio.secure_channel(world.address, credentials, options) as channel:
        call = OrchestratorServiceStub(channel).ListNodes(orchestrator_pb2.ListNodesRequest(), timeout=5)
        assert await refusal(call) == "ROLE_NOT_ALLOWED"


async def test_the_health_service_is_open_to_every_role(world: World) -> None:
    async with world.dialer(NODE).open(world.address, ORCHESTRATOR) as channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_while_tls_is_accepted_both_ports_serve_and_plaintext_is_counted(tmp_path: Path) -> None:
    async with serving(tmp_path, required=False) as world:
        assert world.server.port != world.server.tls_port
        await list_nodes(PLAIN, f"127.0.0.1:{world.server.port}")
        await list_nodes(world.dialer(ROUTER), world.address)
        assert world.value("plaintext_calls_total") == 1
        # A dialler with certificates never goes without TLS.
        assert await code_of(world.dialer(ROUTER), f"127.0.0.1:{world.server.port}") is FULL.UNAVAILABLE


async def test_a_denied_certificate_loses_its_stream_and_is_refused(world: World) -> None:
    stolen, good = world.dialer(ROUTER), world.dialer(ROUTER)
    chain = stolen._certificates.current.chain  # type: ignore[union-attr]
    async with stolen.open(world.address, ORCHESTRATOR) as one, good.open(world.address, ORCHESTRATOR) as other:
        streams = [OrchestratorServiceStub(each).WatchCluster(orchestrator_pb2.WatchClusterRequest()) for each in (one, other)]
        for stream in streams:
            await stream.read()
        (world.folder / "server" / "denied").write_text(f"{fingerprint_of(chain)}\n")
        await world.refresh()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await asyncio.wait_for(read_to_its_end(streams[0]), 2)
        assert caught.value.code() is FULL.PERMISSION_DENIED
        for _ in range(20):
            assert await streams[1].read() is not grpc.aio.EOF
        streams[1].cancel()
    assert await code_of(stolen, world.address) is FULL.PERMISSION_DENIED
    assert await code_of(good, world.address) is FULL.OK


async def test_certificates_change_under_calls_and_processes_without_a_failure(world: World) -> None:
    """gRPC frees each configuration that it is given: one that is handed out twice ends the process."""
    client, failures, calls, stop = world.dialer(ROUTER), [], 0, False
    serials: set[int] = set()

    async def ask() -> None:
        nonlocal calls
        while not stop:
            calls += 1
            if (code := await code_of(client, world.address)) is not FULL.OK:
                failures.append(code)

    def spawn() -> None:
        while not stop:
            subprocess.run(["/bin/true"], check=True)

    tasks = [asyncio.create_task(ask()) for _ in range(2)]
    spawning = asyncio.create_task(asyncio.to_thread(spawn))
    for _ in range(20):
        await asyncio.sleep(0.05)
        world.authority.write(ORCHESTRATOR, world.folder / "server", renew=True)
        await world.refresh()
        serials.add(world.tls.material.current.serial)
    stop = True
    await asyncio.gather(*tasks, spawning)
    assert failures == []
    assert calls > 20
    assert len(serials) == 20


async def test_a_ca_is_replaced_in_three_steps_and_then_trusted_no_more(world: World) -> None:
    new, folder = Authority.new(DEFAULT_TRUST), world.folder / "server"
    old_client = world.dialer(ROUTER)
    client_folder = world.folder / "client"
    world.authority.write(ROUTER, client_folder)
    client_material = live(client_folder)
    client = Dialer(client_material)

    async def step(roots: bytes, issuer: Authority) -> None:
        for peer, each, material in ((ORCHESTRATOR, folder, world.tls.material), (ROUTER, client_folder, client_material)):
            (each / "ca.crt").write_bytes(roots)
            issuer.write(peer, each, renew=True)
            await material.look()
            await list_nodes(client, world.address)

    await step(world.authority.certificate + new.certificate, world.authority)
    await step(world.authority.certificate + new.certificate, new)
    assert await code_of(old_client, world.address) is FULL.UNAVAILABLE, "the old client does not know the new CA"
    await step(new.certificate, new)
    old_client = world.dialer(ROUTER)
    trusting = old_client._certificates.current  # type: ignore[union-attr]
    object.__setattr__(trusting, "roots", new.certificate)
    assert await code_of(old_client, world.address) is FULL.UNAVAILABLE
    assert client.version == 3


@pytest.mark.parametrize(("role", "name"), [(PeerRole.NODE, ""), (PeerRole.ROUTER, "r-2")])
async def test_a_service_does_not_start_with_the_certificate_of_another(tmp_path: Path, role: PeerRole, name: str) -> None:
    Authority.new(DEFAULT_TRUST).write(ROUTER, tmp_path / "tls")
    with pytest.raises(OSError, match="is of router/r-1"):
        ServiceTls.open(tmp_path / "tls", DEFAULT_TRUST, Peer(role, name), TlsMetrics("test", CollectorRegistry()))
