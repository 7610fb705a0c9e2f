"""Two routers with one Redis: a revoked key's streams end at both, and each answer is charged exactly once."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from tests.cluster.keyed.conftest import write_keys
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect
from websockets.typing import Subprotocol

from ryzanstein.auth.caller import DEFAULT_SCOPES, Scope
from ryzanstein.auth.key_form import ApiKey
from ryzanstein.cli.processes.cluster import ClusterSpec, LocalCluster
from ryzanstein.cli.processes.host import LOCAL
from ryzanstein.cli.processes.ports import free_ports
from ryzanstein.demo import MODEL_DIR
from ryzanstein.lab.chaos.machines.redis_server import RedisServer
from ryzanstein.rpc.status import error_from_rpc
from ryzanstein.v1 import inference_pb2 as pb
from ryzanstein.v1 import usage_pb2, worker_pb2
from ryzanstein.v1.inference_pb2_grpc import InferenceServiceStub
from ryzanstein.v1.usage_pb2_grpc import UsageServiceStub
from ryzanstein.v1.worker_pb2_grpc import WorkerServiceStub

pytestmark = [pytest.mark.long, pytest.mark.timeout(180)]

LIMITS = """
[tenant.metered]
tokens_per_minute = 10_000_000
concurrent = 20
"""
PATIENCE_S = 60.0


@dataclass
class Pair:
    """The cluster, and a key of each tenant."""

    cluster: LocalCluster
    keys_file: Path
    keys: dict[str, ApiKey] = field(repr=False)

    def metadata(self, name: str) -> tuple[tuple[str, str], ...]:
        return (("authorization", f"Bearer {self.keys[name].reveal()}"),)

    @contextmanager
    def stub(self, router: int) -> Iterator[InferenceServiceStub]:
        with self.channel(router) as channel:
            yield InferenceServiceStub(channel)

    def channel(self, router: int) -> grpc.Channel:
        options = (("grpc.use_local_subchannel_pool", 1), ("grpc.max_reconnect_backoff_ms", 500))
        return grpc.insecure_channel(self.cluster.router_addresses[router], options)

    def revoke(self, name: str) -> None:
        command = [sys.executable, "-P", "-m", "ryzanstein.cli", "keys", "revoke", self.keys[name].key_id]
        subprocess.run([*command, "--file", str(self.keys_file)], check=True, capture_output=True, timeout=30)

    def running(self) -> int:
        """Returns how many generations the nodes run."""
        running = 0
        for node in self.cluster.node_ids:
            with self.cluster.services[node].dial() as channel:
                status = WorkerServiceStub(channel).GetStatus(worker_pb2.GetStatusRequest(), timeout=10)
                running += status.beat.load.running + status.beat.load.waiting
        return running

    def holds(self) -> float:
        pages = (httpx.get(self.cluster.services[name].metrics_url, trust_env=False).text for name in self.cluster.router_names)
        lines = (line for page in pages for line in page.splitlines() if line.startswith("ryzanstein_router_holds "))
        return sum(float(line.split()[1]) for line in lines)

    def usage(self, tenant: str, router: int = 1) -> usage_pb2.TenantUsage:
        with self.channel(router) as channel:
            request = usage_pb2.GetUsageRequest(tenant=tenant)
            return UsageServiceStub(channel).GetUsage(request, timeout=10, metadata=self.metadata(tenant)).rows[0]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, part: Callable[[str], str]) -> Iterator[Pair]:
    part("redis-server")
    folder = tmp_path_factory.mktemp("pair")
    keys = {name: ApiKey.new() for name in ("victim", "bystander", "metered")}
    scopes = DEFAULT_SCOPES | {Scope.USAGE}
    keys_file = write_keys(folder, LIMITS, {name: (key, name, scopes) for name, key in keys.items()})
    redis = RedisServer(LOCAL, folder / "redis", free_ports(1)[0])
    redis.start()
    flags = ("--keys-file", str(keys_file), "--session-store", "redis", "--redis-url", redis.url)
    spec = ClusterSpec(
        MODEL_DIR,
        num_nodes=2,
        num_routers=2,
        tp=1,
        router_flags=flags,
        api_key=keys["bystander"].reveal(),
        state_dir=folder / "s",
    )
    try:
        with LocalCluster(spec) as cluster:
            yield Pair(cluster, keys_file, keys)
    finally:
        redis.kill()


def chat(tokens: int, **more: Any) -> pb.ChatRequest:
    message = pb.Message(role=pb.ROLE_USER, content="Count from 1 to 100.")
    sampling = pb.SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    return pb.ChatRequest(messages=[message], sampling=sampling, **more)


def reason_of(read: Callable[[], Any]) -> str:
    """Reads to the end. Returns the reason of the error that a call ends with."""
    try:
        read()
    except grpc.RpcError as error:
        return error_from_rpc(error).reason
    return ""


def until(holds: Callable[[], bool], limit_s: float = 10.0) -> None:
    deadline = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.05)


BODY = {"messages": [{"role": "user", "content": "Count from 1 to 100."}], "max_tokens": 1900, "ignore_eos": True}


def end_of_events(url: str, headers: dict[str, str]) -> str:
    """Returns the reason that server-sent events end with."""
    request = {"json": {**BODY, "stream": True}, "headers": headers, "timeout": 30}
    with httpx.stream("POST", f"{url}/v1/chat/completions", trust_env=False, **request) as answer:
        text = "".join(answer.iter_text())
    return "KEY_REVOKED" if "key_revoked" in text else text[-200:]


def end_of_socket(url: str, headers: dict[str, str]) -> str:
    """Returns the code that a socket with five streams is closed with."""
    socket_url, protocols = f"{url.replace('http', 'ws')}/v1/ws", [Subprotocol("ryzanstein.v1")]
    with connect(socket_url, subprotocols=protocols, additional_headers=headers, proxy=None) as socket:
        for number in range(5):
            socket.send(json.dumps({"type": "submit", "id": str(number), "url": "/v1/chat/completions", "body": BODY}))
        try:
            while True:
                socket.recv(30)
        except ConnectionClosed as closed:
            return str(closed.rcvd.code if closed.rcvd is not None else closed)


def num_tokens(stream: Any) -> int:
    return sum(len(response.event.delta.token_ids) for response in stream)


def begin(stub: InferenceServiceStub, metadata: Any) -> tuple[Any, str]:
    """Begins a long answer. Returns its stream and id."""
    stream = stub.StreamChat(pb.StreamChatRequest(chat=chat(1900)), metadata=metadata)
    return stream, next(iter(stream)).event.started.generation_id


def test_what_a_revoked_key_has_ends_at_both_routers_and_on_every_face(pair: Pair) -> None:
    mine = pair.metadata("victim")
    headers = {"authorization": f"Bearer {pair.keys['victim'].reveal()}"}
    urls = [pair.cluster.http_url_of(name) for name in pair.cluster.router_names]
    with pair.stub(0) as first, pair.stub(1) as second, ThreadPoolExecutor(8) as threads:
        one, one_id = begin(first, mine)
        two, _ = begin(first, mine)
        at_the_other = second.AttachGeneration(pb.AttachGenerationRequest(generation_id=one_id), metadata=mine)
        left, left_id = begin(second, mine)
        left.cancel()  # it goes on, unread
        others, _ = begin(second, pair.metadata("bystander"))
        told: Any = threads.submit(num_tokens, others)
        ends = [threads.submit(reason_of, partial(list, stream)) for stream in (one, two, at_the_other)]
        ends += [threads.submit(end_of_events, urls[1], headers), threads.submit(end_of_socket, urls[0], headers)]
        until(lambda: pair.running() >= 9)
        pair.revoke("victim")
        began = time.monotonic()
        assert [end.result(10) for end in ends] == ["KEY_REVOKED"] * 4 + ["4009"]
        assert time.monotonic() - began < 2.5
        until(lambda: pair.running() <= 1, 3)  # the bystander's
        assert told.result(PATIENCE_S) == 1900
    until(lambda: pair.holds() == 0)
    attach = pb.AttachGenerationRequest(generation_id=left_id)
    for router in range(2):
        with pair.stub(router) as stub:
            assert reason_of(partial(stub.Chat, chat(1), metadata=mine)) == "KEY_REVOKED"
            assert reason_of(lambda stub=stub: list(stub.AttachGeneration(attach, metadata=mine))) == "KEY_REVOKED"  # type: ignore[misc]


class Reader:
    """Reads an answer to its end, at the other router where the one it asked is gone, and keeps what it used."""

    def __init__(self, pair: Pair, request: pb.ChatRequest, router: int = 0) -> None:
        self._pair, self._request, self._router = pair, request, router
        self.generation_id, self.prompt, self.generated = "", 0, 0
        self.begun = threading.Event()

    def read(self) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                with self._pair.stub(self._router) as stub:
                    self._follow(stub)
                return
            except grpc.RpcError:
                assert time.monotonic() < deadline
                self._router = 1 - self._router
                time.sleep(0.05)

    def _follow(self, stub: InferenceServiceStub) -> None:
        mine: Any = self._pair.metadata("metered")
        if self.generation_id:
            calls: Any = stub.AttachGeneration(pb.AttachGenerationRequest(generation_id=self.generation_id), metadata=mine)
        else:
            calls = stub.StreamChat(pb.StreamChatRequest(chat=self._request), metadata=mine)
        for response in calls:
            event = response.event
            self.generation_id = self.generation_id or event.started.generation_id
            self.begun.set() if event.delta.token_ids else None
            if event.HasField("finished") and event.finished.usage.completion_tokens:
                self.prompt, self.generated = event.finished.usage.prompt_tokens, event.finished.usage.completion_tokens


def read_all(readers: list[Reader], meanwhile: Callable[[], None] = lambda: None) -> None:
    with ThreadPoolExecutor(len(readers)) as threads:
        reads = [threads.submit(reader.read) for reader in readers]
        for reader in readers:
            assert reader.begun.wait(30)
        meanwhile()
        for read in reads:
            read.result(PATIENCE_S)


def charged_since(pair: Pair, before: usage_pb2.TenantUsage, readers: list[Reader]) -> None:
    """Checks that each answer is charged once, to the token."""
    expected = len(readers), sum(reader.prompt for reader in readers), sum(reader.generated for reader in readers)

    def charged() -> tuple[int, int, int]:
        now = pair.usage("metered")
        return (
            now.requests - before.requests,
            now.prompt_tokens - before.prompt_tokens,
            now.generated_tokens - before.generated_tokens,
        )

    deadline = time.monotonic() + 15
    while charged() != expected and time.monotonic() < deadline:
        time.sleep(0.2)
    assert charged() == expected
    until(lambda: pair.holds() == 0)


def test_what_is_charged_is_what_was_generated_not_what_was_asked_for(pair: Pair) -> None:
    before = pair.usage("metered")
    short = pb.ChatRequest(messages=[pb.Message(role=pb.ROLE_USER, content="Hello!")])
    short.sampling.max_tokens = 1900
    many = chat(20)
    many.sampling.n, many.sampling.temperature = 16, 1.0
    readers = [Reader(pair, request) for request in (short, many, chat(30))]
    read_all(readers)
    left = Reader(pair, chat(300))
    with pair.stub(0) as stub:
        stream = stub.StreamChat(pb.StreamChatRequest(chat=chat(300)), metadata=pair.metadata("metered"))
        for response in stream:
            left.generation_id = left.generation_id or response.event.started.generation_id
            if response.event.delta.first_index >= 2:
                break
        stream.cancel()
    left.read()  # it went on, or was ended: its end says what it used
    assert readers[1].generated == 16 * 20
    charged_since(pair, before, [*readers, left])


def test_an_answer_that_moves_to_another_node_is_charged_once(pair: Pair) -> None:
    before = pair.usage("metered")
    readers = [Reader(pair, chat(1000)) for _ in range(6)]
    read_all(readers, lambda: pair.cluster.kill("node-0"))
    pair.cluster.restart("node-0")
    pair.cluster.wait_nodes(2)
    assert [reader.generated for reader in readers] == [1000] * 6
    charged_since(pair, before, readers)


def test_answers_of_a_router_that_died_are_charged_once_and_hold_nothing(pair: Pair) -> None:
    before = pair.usage("metered")
    readers = [Reader(pair, chat(600)) for _ in range(20)]
    read_all(readers, lambda: pair.cluster.kill("router-0"))
    pair.cluster.restart("router-0")
    assert [reader.generated for reader in readers] == [600] * 20
    charged_since(pair, before, readers)
    read_all([Reader(pair, chat(2), router=1) for _ in range(20)])  # as many at once as the tenant may have
