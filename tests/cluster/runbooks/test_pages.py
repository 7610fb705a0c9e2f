"""Every page of docs/operate/runbooks is tried: the fault is real, and so is each command and expression of the page."""

from __future__ import annotations

import itertools
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from ryzanstein.cli.processes.host import LOCAL
from ryzanstein.cli.processes.ports import free_ports
from ryzanstein.cli.status.scrape import total
from ryzanstein.lab.chaos.machines.clocks import Clocks
from ryzanstein.lab.chaos.machines.llama.server import LlamaServer, llama_file
from ryzanstein.lab.chaos.machines.small_disk import SmallDisk
from ryzanstein.v1 import debug_pb2
from ryzanstein.v1 import inference_pb2 as inference
from ryzanstein.v1 import inference_pb2_grpc as inference_grpc
from ryzanstein.v1.debug_pb2_grpc import DebugServiceStub

pytestmark = [pytest.mark.timeout(240)]

# What the laboratory's sabotage of ranks listens to.
SKIP_COLLECTIVE, NAN_LOGITS, HANG = signal.SIGRTMIN + 1, signal.SIGRTMIN + 2, signal.SIGRTMIN + 4


def chat(text: str, **more: Any) -> inference.StreamChatRequest:
    sampling = inference.SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
    message = inference.Message(role=inference.ROLE_USER, content=text)
    return inference.StreamChatRequest(chat=inference.ChatRequest(messages=[message], sampling=sampling, **more))


def answer(world: Any, session_id: str, user: str = "", text: str = "Hello!") -> str:
    """Asks for one token; the node that gave it."""
    with grpc.insecure_channel(world.cluster.router_address) as channel:
        request = chat(text, session_id=session_id, user=user).chat
        request.sampling.max_tokens = 1
        return str(inference_grpc.InferenceServiceStub(channel).Chat(request, timeout=30).node_id)


def session_on(world: Any, node_id: str) -> str:
    """The id of a session that belongs to the node."""
    return sessions_on(world, node_id, 1)[0]


def idle_bytes(pid: int) -> int:
    """The address space of a rank between two steps of its load: the least of many looks."""
    rank, least = psutil.Process(pid), sys.maxsize
    for _ in range(100):
        least = min(least, rank.memory_info().vms)
        time.sleep(0.003)
    return least


def sessions_on(world: Any, node_id: str, count: int) -> list[str]:
    """The ids of so many sessions that belong to the node."""
    found = []
    for number in range(64):
        if answer(world, session_id := f"near-{node_id}-{number}") == node_id:
            found.append(session_id)
        if len(found) == count:
            return found
    pytest.fail(f"only {found} belong to {node_id}")


def test_node_died(world: Any, walk: Any, all_ready: None) -> None:
    with world.load() as load:
        page = walk(world, "node-died", world.variables("node-1"))
        page.run(load=load, strike=lambda: world.cluster.kill("node-1"), heal=lambda: world.cluster.restart("node-1"))
    assert load.failures == []


def test_node_frozen(world: Any, walk: Any, all_ready: None) -> None:
    with world.load() as load:
        page = walk(world, "node-frozen", world.variables("node-1"))
        page.run(load=load, strike=lambda: world.cluster.kill("node-1", signal.SIGSTOP))
    assert load.failures == []


@pytest.mark.parametrize("number", [signal.SIGKILL, SKIP_COLLECTIVE], ids=["killed", "skipped"])
def test_rank_died(world: Any, walk: Any, all_ready: None, number: int) -> None:
    with world.load() as load:
        page = walk(world, "rank-died", world.variables("node-0", RANK="1"))
        page.run(load=load, strike=lambda: os.kill(world.ranks("node-0")[1].pid, number))
    assert load.failures == []


def test_rank_stalled(world: Any, walk: Any, all_ready: None) -> None:
    with world.load() as load:
        page = walk(world, "rank-stalled", world.variables("node-0", RANK="0"))
        page.run(load=load, strike=lambda: os.kill(world.ranks("node-0")[0].pid, signal.SIGSTOP))
    assert load.failures == []


def test_orchestrator_died(world: Any, walk: Any, all_ready: None) -> None:
    with world.load(1) as load:
        page = walk(world, "orchestrator-died", world.variables("node-1"))
        page.run(
            load=load, strike=lambda: world.cluster.kill("orchestrator"), heal=lambda: world.cluster.restart("orchestrator")
        )
    assert load.failures == []


def test_orchestrator_unreachable(world: Any, walk: Any, all_ready: None) -> None:
    """The line from the nodes to the orchestrator swallows everything; the router's own stays."""
    with world.load(1) as load:
        page = walk(world, "orchestrator-unreachable", world.variables("node-1"))
        page.run(
            load=load, strike=lambda: world.to_orchestrator.tell("blackhole"), heal=lambda: world.to_orchestrator.tell("pass")
        )
    assert load.failures == []


def test_partition(world: Any, walk: Any, all_ready: None, behind_a_line: Any) -> None:
    """A line that swallows both ways stands for the packet filter; new connections hang in it as well."""
    with world.load() as load:
        page = walk(world, "partition", world.variables("node-1", NODE_PATH=behind_a_line.address))
        page.run(load=load, strike=lambda: behind_a_line.tell("blackhole"), heal=lambda: behind_a_line.tell("pass"))
    assert load.failures == []


def test_far_node(world: Any, walk: Any, all_ready: None, behind_a_line: Any) -> None:
    with world.load() as load:
        walk(world, "far-node", world.variables("node-1")).run(load=load, strike=lambda: behind_a_line.tell("delay 0.5"))
    assert load.failures == []


def test_client_gone(world: Any, walk: Any, all_ready: None) -> None:
    variables = world.variables("node-0")

    def strike() -> None:
        """A reader leaves and comes back; another one leaves for good, and its generation outlives the window of 1 s."""
        for comes_back in (False, True):
            with grpc.insecure_channel(world.cluster.router_address) as channel:
                stub = inference_grpc.InferenceServiceStub(channel)
                asked = chat("Count from 1 to 60.")
                asked.chat.sampling.max_tokens = 1900  # so that it still runs when its reader comes back
                stream = stub.StreamChat(asked, timeout=30)
                generation_id = next(iter(stream)).event.started.generation_id
                variables["GENERATION"] = f"chatcmpl-{generation_id}"
                stream.cancel()
                if comes_back:
                    request = inference.AttachGenerationRequest(generation_id=generation_id)
                    next(iter(stub.AttachGeneration(request, timeout=30)))

    walk(world, "client-gone", variables).run(strike=strike)


def test_drain(world: Any, walk: Any, all_ready: None) -> None:
    drained = world.variables("node-1")
    command = ("ryzanstein", "drain", "node-1", "--orchestrator", world.cluster.orchestrator_address)

    def strike() -> None:
        subprocess.run([os.path.join(os.path.dirname(sys.executable), command[0]), *command[1:]], check=True, timeout=30)

    def heal() -> None:
        assert world.cluster.services["node-1"].wait_ended(10)
        world.cluster.restart("node-1")

    with world.load() as load:
        walk(world, "drain", drained).run(load=load, strike=strike, heal=heal)
    assert load.failures == []


def test_no_nodes(world: Any, walk: Any, all_ready: None) -> None:
    pids = " ".join(str(world.cluster.services[node_id].pid) for node_id in world.cluster.node_ids)

    def strike() -> None:
        for node_id in world.cluster.node_ids:
            world.cluster.kill(node_id, signal.SIGSTOP)

    with world.load():
        walk(world, "no-nodes", world.variables("node-1", PIDS=pids)).run(strike=strike)


def test_false_alarms(world: Any, walk: Any, all_ready: None) -> None:
    """An agent that stands still for a moment again and again is late as on a machine that is too full."""

    def strike() -> None:
        for _ in range(12):
            world.cluster.kill("node-1", signal.SIGSTOP)
            time.sleep(0.5)
            world.cluster.kill("node-1", signal.SIGCONT)
            time.sleep(0.5)

    with world.load() as load:
        walk(world, "false-alarms", world.variables("node-1")).run(load=load, strike=strike)
    assert load.failures == []


def test_router_died(world: Any, walk: Any, all_ready: None) -> None:
    variables = world.variables("node-1", OTHER_ROUTER=world.cluster.router_addresses[1])
    page = walk(world, "router-died", variables)
    page.run(strike=lambda: world.cluster.kill("router-0"), heal=lambda: world.cluster.restart("router-0"))


def test_slow_rank(world: Any, walk: Any, all_ready: None) -> None:
    """The laboratory's throttle, as strong as in its row: a fast processor computes a step within milliseconds."""
    throttles: list[subprocess.Popen[bytes]] = []

    def strike() -> None:
        command = (sys.executable, "-m", "ryzanstein.lab.chaos.machines.throttle", str(world.ranks("node-0")[1].pid), "20")
        throttles.append(subprocess.Popen(command, stdin=subprocess.PIPE))

    def heal() -> None:
        for throttle in throttles:
            throttle.communicate(timeout=10)

    try:
        with world.load() as load:
            walk(world, "slow-rank", world.variables("node-0", RANK="1")).run(load=load, strike=strike, heal=heal)
    finally:
        heal()
    assert load.failures == []


def test_rank_out_of_memory(world: Any, walk: Any, all_ready: None, environment: Any) -> None:
    """No rank of the node may map another byte, and long prompts come whose steps need some. Every larger allocation is
    the system's, so that the limit is what decides; a step may still find what an earlier one has freed."""
    with environment(MALLOC_MMAP_THRESHOLD_="65536"):
        world.cluster.restart("node-0")
    world.cluster.wait_nodes(2)
    sessions = sessions_on(world, "node-0", 4)
    pids = [rank.pid for rank in world.ranks("node-0")]

    def limit(bound: Callable[[int], int]) -> None:
        for pid in pids:
            with suppress(ProcessLookupError):
                resource.prlimit(pid, resource.RLIMIT_AS, (bound(pid), resource.RLIM_INFINITY))

    def strike() -> None:
        limit(idle_bytes)
        for session_id in sessions:
            answer(world, session_id, text=f"{session_id}: " + "Count from 1 to 60. " * 200)

    with world.load() as load:
        page = walk(world, "rank-out-of-memory", world.variables("node-0"))
        page.run(load=load, strike=strike, heal=lambda: limit(lambda pid: resource.RLIM_INFINITY))
    assert load.failures == []


def test_nan_logits(world: Any, walk: Any, all_ready: None) -> None:
    variables = world.variables("node-0", MODEL=str(world.cluster.spec.model))
    with world.load():
        page = walk(world, "nan-logits", variables)
        page.run(strike=lambda: [os.kill(rank.pid, NAN_LOGITS) for rank in world.ranks("node-0")])


def test_clock_jump(world: Any, walk: Any, all_ready: None, environment: Any, tmp_path: Path) -> None:
    """The router's: to it all nodes are an hour behind."""
    clocks = Clocks(tmp_path)
    with environment(**clocks.environment("router-0")):
        world.cluster.restart("router-0")
    world.cluster.wait_nodes(2)
    walk(world, "clock-jump", world.variables("node-1")).run(
        strike=lambda: clocks.turn("router-0", 3600), heal=lambda: world.cluster.restart("router-0")
    )


def test_session_store_sqlite(world: Any, walk: Any, all_ready: None) -> None:
    """Another process holds the file in a transaction. A full disk is the laboratory's `store_disk_full`."""
    session_id = session_on(world, "node-0")
    holder = (
        "import sqlite3, sys, time\n"
        "held = sqlite3.connect(sys.argv[1], isolation_level=None)\n"
        "held.execute('PRAGMA busy_timeout=20000'), held.execute('BEGIN EXCLUSIVE')\n"
        "print('held', flush=True), time.sleep(600)\n"
    )
    held = subprocess.Popen(
        (sys.executable, "-c", holder, str(world.cluster.state_dir / "sessions.db")), stdout=subprocess.PIPE, text=True
    )
    try:
        variables = world.variables("node-0", SESSION=session_id, SESSIONS=str(world.cluster.state_dir), HOLDER=str(held.pid))

        def strike() -> None:
            assert held.stdout is not None
            assert held.stdout.readline() == "held\n"
            answer(world, session_id)

        walk(world, "session-store-sqlite", variables).run(strike=strike)
    finally:
        held.kill()
        held.communicate()


def test_page_tier(make_world: Any, walk: Any, tmp_path: Path) -> None:
    """The pages are on a disk of their own that something else fills up. Damaged pages are the laboratory's `pages_damaged`."""
    with SmallDisk(tmp_path / "pages") as disk:
        flags = ("--kv-replication", "none", "--kv-disk-bytes", str(2**28), "--kv-disk-dir", str(tmp_path / "pages"))
        with make_world(num_nodes=1, tp=1, worker_flags=flags) as world, world.load(distinct=True) as load:
            variables = world.variables("node-0", KV_DISK_DIR=str(tmp_path / "pages"))
            walk(world, "page-tier", variables).run(load=load, strike=disk.fill)
            assert load.failures == []


@pytest.mark.lab
def test_hung_request(make_world: Any, walk: Any) -> None:
    """The watchdog of the ranks is off, and there is no other node: the answers wait as long as their clients do."""
    flags = ("--tuning", '{"ranks": {"stall": {"min_s": 3600}}}')
    with make_world(num_nodes=1, tp=2, worker_flags=flags) as world, world.load(1) as load:
        page = walk(world, "hung-request", world.variables("node-0", RANK="1"))

        def strike() -> None:
            os.kill(world.ranks("node-0")[1].pid, HANG)
            with grpc.insecure_channel(world.cluster.router_address) as channel:
                (request,) = DebugServiceStub(channel).FindRequests(debug_pb2.FindRequestsRequest(), timeout=10).requests
            page.variables["REQUEST"] = request.request_id

        page.run(load=load, strike=strike)
    assert load.failures == []


@pytest.mark.parametrize("hangs", [False, True], ids=["killed", "hung"])
def test_engine_lost(make_world: Any, walk: Any, tmp_path: Path, hangs: bool) -> None:
    path = llama_file(tmp_path)
    servers = [LlamaServer(LOCAL, path, tmp_path / f"{number}.log", port) for number, port in enumerate(free_ports(2))]

    def strike() -> None:
        if hangs:
            os.kill(servers[0].pid or 0, signal.SIGSTOP)
        else:
            servers[0].kill()

    def heal() -> None:
        servers[0].kill()
        servers[0].start()

    try:
        for server in servers:
            server.start()
        with make_world(num_nodes=2, engines=tuple(server.url for server in servers)) as world, world.load(ends=True) as load:
            load.wait_on("node-0")
            walk(world, "engine-lost", world.variables("node-0")).run(load=load, strike=strike, heal=heal)
            assert load.failures == []
    finally:
        for server in servers:
            server.kill()


def test_load_imbalance(make_world: Any, walk: Any) -> None:
    """Every request belongs to one session: its node gets them all. The window is short, so that it ends."""
    flags = ("--tuning", '{"balance": {"window_s": 6, "thresholds": {"floor": 16, "calm_s": 1}}}')
    with make_world(num_nodes=2, tp=1, router_flags=flags) as world:
        session_id = session_on(world, "node-0")

        def strike() -> None:
            """Asks until the alarm is raised: the bound that comes with it soon makes the load even again."""
            url, until = world.cluster.services["router-0"].metrics_url, time.monotonic() + 30
            while not total(url, "ryzanstein_router_load_imbalance_alarm"):
                assert time.monotonic() < until, "no alarm"
                for _ in range(10):
                    answer(world, "", user=session_id)

        def heal() -> None:
            until = time.monotonic() + 9
            for number in itertools.count():
                answer(world, "", user=f"even-{number}")
                if time.monotonic() > until:
                    return

        walk(world, "load-imbalance", world.variables("node-0")).run(strike=strike, heal=heal)


@pytest.fixture(scope="module")
def small(make_world: Any, part: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """One node with two places, whose router keeps sessions in a Redis and has a keys file, which callers may do without."""
    folder = tmp_path_factory.mktemp("redis")
    subprocess.run(
        [Path(sys.executable).with_name("ryzanstein"), "keys", "add", "acme", "--file", folder / "keys.toml"], check=True
    )
    server = part("redis-server")
    (port,) = free_ports(1)
    command = (server, "--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder), "--appendonly", "yes")
    redis = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        node = ("--max-sequences", "2", "--max-waiting", "16", "--max-tokens-per-step", "64")
        router = ("--session-store", "redis", "--redis-url", f"redis://127.0.0.1:{port}/0")
        router += ("--auth", "optional", "--keys-file", str(folder / "keys.toml"))
        with make_world(num_nodes=1, tp=1, worker_flags=node, router_flags=router) as world:
            yield world, redis, port, folder
    finally:
        redis.kill()
        redis.wait()


def test_overload(small: Any, walk: Any) -> None:
    """More clients than the node has places, in the batch and in the line."""
    world = small[0]
    world.wait_idle()
    load = world.load(48)
    with closing(load):
        walk(world, "overload", world.variables("node-0", CAPACITY="2")).run(strike=load.start, heal=load.close)
    assert load.failures
    assert all("RESOURCE_EXHAUSTED" in failure for failure in load.failures)


def test_unfair_tenant(small: Any, walk: Any) -> None:
    world = small[0]
    world.wait_idle()
    load = world.load(10)
    with closing(load):
        walk(world, "unfair-tenant", world.variables("node-0")).run(strike=load.start, heal=load.close)
    assert load.failures == []


def test_session_store_redis(small: Any, walk: Any) -> None:
    world, redis, port, folder = small
    world.wait_idle()
    session_id = session_on(world, "node-0")

    def strike() -> None:
        redis.kill()
        redis.wait()
        answer(world, session_id)

    variables = world.variables("node-0", SESSION=session_id, REDIS_PORT=str(port), REDIS_DIR=str(folder))
    try:
        walk(world, "session-store-redis", variables).run(strike=strike)
    finally:
        with suppress(OSError, ValueError):
            os.kill(int((folder / "pid").read_text()), signal.SIGKILL)


def test_keys_stale(small: Any, walk: Any) -> None:
    """A table that is written by hand, with a field that nobody knows."""
    world, _, _, folder = small
    file = folder / "keys.toml"

    def strike() -> None:
        file.write_text(f"{file.read_text()}[tenant.acme]\ncolour = 1\n")

    walk(world, "keys-stale", world.variables("node-0", KEYS_FILE=str(file))).run(strike=strike)
    assert answer(world, session_on(world, "node-0")) == "node-0"
