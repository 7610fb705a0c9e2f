"""Records of operators' acts: the file, and what the auditor does when records cannot be written."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from prometheus_client import CollectorRegistry

from ryzanstein import errors
from ryzanstein.auth.audit.actor import actor_of, address_of
from ryzanstein.auth.audit.audit_file import AuditFile, audit_files
from ryzanstein.auth.audit.audit_record import AuditRecord, AuditUnwrittenError
from ryzanstein.auth.audit.auditor import Auditor, audit_failures
from ryzanstein.errors import RyzansteinError
from ryzanstein.process.background import Background
from ryzanstein.rpc.client import open_channel
from ryzanstein.v1 import orchestrator_pb2 as pb
from ryzanstein.v1.orchestrator_pb2_grpc import (
    OrchestratorServiceServicer,
    OrchestratorServiceStub,
    add_OrchestratorServiceServicer_to_server,
)


class Call:
    """What gRPC says of a call: the fields that a record takes from it."""

    def __init__(self, *uris: bytes) -> None:
        self._uris = uris

    def auth_context(self) -> dict[str, Any]:
        return {"peer_uri": list(self._uris)} if self._uris else {}

    def peer(self) -> str:
        return "ipv6:%5B::1%5D:4"


class Records:
    """A sink whose disk answers when the test says so."""

    def __init__(self) -> None:
        self.written: list[AuditRecord] = []
        self.free = asyncio.Event()
        self.free.set()
        self.fails = False
        self.second = asyncio.Event()

    async def write(self, record: AuditRecord) -> None:
        await self.free.wait()
        if self.fails:
            raise AuditUnwrittenError("no disk")
        self.written.append(record)
        if len(self.written) == 2:
            self.second.set()

    @property
    def outcomes(self) -> list[tuple[str, str]]:
        return [(each.outcome, each.reason) for each in self.written]


def record(number: int = 0) -> AuditRecord:
    return AuditRecord(f"id-{number}", 0.0, "", "", "Drain", "n-1", "")


def auditor_of(*sinks: Any, write_s: float = 2.0) -> tuple[Auditor, Any]:
    registry = CollectorRegistry()
    failures = audit_failures("worker", registry)
    return Auditor(Background("worker", registry), failures, sinks, write_s=write_s), failures


def count(failures: Any, part: str) -> float:
    return failures.labels(part)._value.get()


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


async def test_a_file_is_private_and_a_renamed_one_is_followed_by_a_new_one(tmp_path: Path) -> None:
    path = tmp_path / "made" / "audit.jsonl"
    (file,) = await audit_files(path, {"service": "worker"})
    await file.write(record(1))
    path.rename(tmp_path / "old.jsonl")
    await file.write(record(2))
    assert [(each["id"], each["service"], each["audit"]) for each in lines(path)] == [("id-2", "worker", True)]
    assert [each["id"] for each in lines(tmp_path / "old.jsonl")] == ["id-1"]
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("kind", ["pipe", "folder gone", "locked"])
async def test_a_file_that_cannot_be_written_is_an_error_soon(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "audit.jsonl"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "locked":
        holder = path.open("w")
        fcntl.flock(holder, fcntl.LOCK_EX)
    else:
        path = tmp_path / "gone" / "audit.jsonl"
    async with asyncio.timeout(5):
        with pytest.raises(AuditUnwrittenError, match=r"audit\.jsonl"):
            await AuditFile(path, {}).write(record())
    if kind == "locked":
        holder.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting needs root")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


async def test_a_full_disk_leaves_whole_lines_alone_and_goes_on_when_there_is_room(small_disk: Path) -> None:
    file = AuditFile(small_disk / "audit.jsonl", {})
    await file.write(record(0))
    filler = small_disk / "filler"
    with suppress(OSError), filler.open("wb", buffering=0) as full:
        while full.write(bytes(4096)):
            pass
    written, error = 0, ""
    while not error:
        written += 1
        assert written < 100
        try:
            await file.write(record(written))
        except AuditUnwrittenError as refused:
            error = str(refused)
    assert "No space left" in error
    assert [each["id"] for each in lines(small_disk / "audit.jsonl")] == [f"id-{n}" for n in range(written)]
    filler.unlink()
    await file.write(record(written))
    assert len(lines(small_disk / "audit.jsonl")) == written + 1


async def test_an_act_that_is_done_refused_failed_or_left_is_one_record() -> None:
    records = Records()
    auditor, _ = auditor_of(records)
    async with auditor.act(Call(b"spiffe://t/operator/ada"), "Drain", "x" * 3000, {"draining": False}) as act:
        assert records.outcomes == [("unknown", "")]
        act.after = {"draining": True}
    first, last = records.written
    assert (first.id, first.actor, first.via, len(first.target)) == (last.id, "operator/ada", "ipv6:[::1]:4", 1024)
    assert (last.outcome, last.before, last.after) == ("done", {"draining": False}, {"draining": True})
    for error, outcome in [
        (errors.not_found("node", "n"), ("refused", "NODE_NOT_FOUND")),
        (errors.unavailable("STORE_UNAVAILABLE", ""), ("failed", "STORE_UNAVAILABLE")),
        (ValueError(), ("failed", "INTERNAL")),
        (asyncio.CancelledError(), ("unknown", "CANCELLED")),
    ]:
        with pytest.raises(type(error)):
            async with auditor.act(Call(), "Drain", "n"):
                raise error
        await asyncio.sleep(0.01)
        assert records.outcomes[-1] == outcome
    assert len({each.id for each in records.written}) == 5


async def test_an_act_whose_intent_cannot_be_written_is_not_done() -> None:
    well, ill = Records(), Records()
    ill.fails = True
    auditor, failures = auditor_of(well, ill)
    with pytest.raises(RyzansteinError) as refused:
        async with auditor.act(Call(), "Drain", "n"):
            raise AssertionError("it was done")
    assert (refused.value.code, refused.value.reason, refused.value.retry_after_s) == (
        errors.Code.UNAVAILABLE,
        "AUDIT_UNAVAILABLE",
        1.0,
    )
    await asyncio.sleep(0.01)
    assert well.outcomes[-1] == ("refused", "AUDIT_UNAVAILABLE")
    assert (count(failures, "intent"), count(failures, "outcome")) == (1, 0)


async def test_an_outcome_that_cannot_be_written_is_counted_and_the_act_stands() -> None:
    records = Records()
    auditor, failures = auditor_of(records)
    async with auditor.act(Call(), "Drain", "n"):
        records.fails = True
    assert (count(failures, "intent"), count(failures, "outcome")) == (0, 1)


async def test_a_disk_that_hangs_refuses_in_time_and_then_at_once_and_what_it_wrote_late_is_withdrawn() -> None:
    records = Records()
    records.free.clear()
    auditor, failures = auditor_of(records, write_s=0.2)
    loop = asyncio.get_running_loop()
    for most_s in (1.0, 0.1, 0.1):
        began = loop.time()
        with pytest.raises(RyzansteinError, match="nothing was done"):
            async with auditor.act(Call(), "Drain", "n"):
                raise AssertionError("it was done")
        assert loop.time() - began < most_s
    assert count(failures, "intent") == 3
    records.free.set()
    async with asyncio.timeout(5):
        await records.second.wait()
    assert records.outcomes == [("unknown", ""), ("refused", "AUDIT_UNAVAILABLE")]
    async with auditor.act(Call(), "Drain", "n"):
        pass
    assert records.outcomes[-1] == ("done", "")


@pytest.mark.parametrize(
    ("uris", "actor"),
    [
        ((), ""),
        ((b"spiffe://ryzanstein.internal/operator/ada%20l",), "operator/ada l"),
        ((b"spiffe://ryzanstein.internal/orchestrator",), "orchestrator"),
        ((b"spiffe://a/operator/x", b"spiffe://a/node/y"), ""),
    ],
)
def test_the_actor_is_the_path_of_the_one_uri(uris: tuple[bytes, ...], actor: str) -> None:
    assert actor_of(Call(*uris)) == actor


def operators_certificate(tmp_path: Path) -> tuple[bytes, bytes]:
    """Returns a key, and a certificate that is its own CA."""
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    made = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "1"]
    names = "subjectAltName=DNS:localhost,URI:spiffe://ryzanstein.internal/operator/ada"
    files = ["-keyout", str(key), "-out", str(certificate), "-subj", "/CN=x", "-addext", names]
    subprocess.run([*made, *files], check=True, capture_output=True)
    return key.read_bytes(), certificate.read_bytes()


async def test_the_actor_of_a_real_connection_is_in_its_client_certificate(tmp_path: Path) -> None:
    (secret, chain), seen = operators_certificate(tmp_path), []

    class Servicer(OrchestratorServiceServicer):
        async def ListNodes(self, request: Any, context: Any) -> Any:
            seen.append((actor_of(context), address_of(context).rpartition(":")[0]))
            return pb.ListNodesResponse()

    server = grpc.aio.server()
    add_OrchestratorServiceServicer_to_server(Servicer(), server)
    asks = grpc.ssl_server_credentials([(secret, chain)], root_certificates=chain, require_client_auth=True)
    secure, plain = server.add_secure_port("127.0.0.1:0", asks), server.add_insecure_port("127.0.0.1:0")
    await server.start()
    shows = grpc.ssl_channel_credentials(chain, secret, chain)
    options = [("grpc.ssl_target_name_override", "localhost"), ("grpc.enable_http_proxy", 0)]
    async with grpc.aio.secure_channel(f"127.0.0.1:{secure}", shows, options=options) as channel:
        await OrchestratorServiceStub(channel).ListNodes(pb.ListNodesRequest(), timeout=10)
    async with open_channel(f"127.0.0.1:{plain}") as channel:
        await OrchestratorServiceStub(channel).ListNodes(pb.ListNodesRequest(), timeout=10)
    await server.stop(0)
    assert seen == [("operator/ada", "ipv4:127.0.0.1"), ("", "ipv4:127.0.0.1")]
