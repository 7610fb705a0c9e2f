"""Real nodes as processes, and a router's end of the link to one."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from ryzanstein.generation.prompts import ChatPrompt, Message, Role
from ryzanstein.generation.request import Attempt, ChoiceProgress, GenerationRequest, SamplingParams
from ryzanstein.rpc.client import open_channel
from ryzanstein.v1 import worker_pb2 as pb
from ryzanstein.v1.worker_pb2_grpc import WorkerServiceStub
from ryzanstein.wire.attempts import attempt_to_wire
from ryzanstein.worker.text.tokenizer import TextModel

DEMO = Path(__file__).parents[2] / "shared" / "ryzanstein" / "demo"
START_S = 60


class NodeProcess:
    """`python -P -m ryzanstein.worker` on a free port, its log read for the port and for what happened."""

    def __init__(self, log_path: Path, *flags: str, model: Path | None = DEMO, tp: int = 2) -> None:
        self.log_path = log_path
        command = [sys.executable, "-m", "ryzanstein.worker", "--grpc-port", "0", "--node-id", "node-t"]
        if "--engine" in flags:
            tp = 0
        model_flags = ("--model", str(model)) if model is not None else ()
        # Whatever computes in these tests is judged by what a CPU computes, on a machine with GPUs too.
        rank_flags = (
            ("--device", "cpu", "--threads-per-rank", "1", *(("--tp", str(tp)) if model is not None else ())) if tp else ()
        )
        command += [*model_flags, *rank_flags, *flags]
        with log_path.open("wb") as log:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)

    @property
    def events(self) -> list[dict]:
        """The log's lines so far."""
        lines = self.log_path.read_text().splitlines()
        return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]

    def wait_event(self, event: str, timeout_s: float = START_S) -> dict:
        """The first such line of the log."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            found = next((line for line in self.events if line["event"] == event), None)
            if found is not None:
                return found
            assert self.process.poll() is None, self.log_path.read_text()[-4000:]
            time.sleep(0.05)
        raise AssertionError(f"no {event!r} in {timeout_s} s: {self.log_path.read_text()[-4000:]}")

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.wait_event('serving')['grpc_port']}"

    @property
    def metrics_port(self) -> int:
        return self.wait_event("serving")["metrics_port"]

    def rank_pids(self) -> list[int]:
        """Of the agent's children the fork server has children of its own, which are the ranks."""
        return [pid for server in self.server_pids() for pid in _children(server)]

    def server_pids(self) -> list[int]:
        return [pid for pid in _children(self.process.pid) if _name(pid) not in ("templates", "grammars")]

    def template_pids(self) -> list[int]:
        """The process that renders chat templates."""
        return [pid for pid in _children(self.process.pid) if _name(pid) == "templates"]

    def grammar_pids(self) -> list[int]:
        """The process that compiles constraints to judge them."""
        return [pid for pid in _children(self.process.pid) if _name(pid) == "grammars"]

    def close(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def _name(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.fixture
def start_node(tmp_path):
    """Starts nodes that end with the test."""
    nodes = []

    def start(*flags: str, **more) -> NodeProcess:
        nodes.append(NodeProcess(tmp_path / f"node-{len(nodes)}.log", *flags, **more))
        return nodes[-1]

    yield start
    for node in nodes:
        node.close()


@pytest.fixture(scope="session")
def node_process():
    """What `start_node` starts, for nodes that several tests share."""
    return NodeProcess


@pytest.fixture(scope="session")
def node(tmp_path_factory):
    """A node with two ranks that serves the demo model, shared by all tests that leave it as they found it."""
    node = NodeProcess(tmp_path_factory.mktemp("node") / "node.log")
    try:
        node.wait_event("ranks ready")
        yield node
    finally:
        node.close()


@pytest.fixture(scope="session")
def demo_dir() -> Path:
    return DEMO


@pytest.fixture(scope="session")
def second(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of another shape than the demo's."""
    folder = tmp_path_factory.mktemp("models") / "second"
    command = [sys.executable, "-m", "ryzanstein.tools.synthesize.command", str(folder), "--preset", "S"]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    return folder


@pytest.fixture(scope="session")
def text_model() -> TextModel:
    return TextModel.load(DEMO)


@pytest.fixture
async def stub(node):
    async with open_channel(node.address) as channel:
        yield WorkerServiceStub(channel)


class Stream:
    """What one attempt got from the node."""

    def __init__(self) -> None:
        self.prompt_tokens: int | None = None
        self.rows: dict[int, list[tuple[int, int, str]]] = {}
        self.logprobs: dict[tuple[int, int], object] = {}
        self.prompt_parts: list[object] = []
        self.finished: dict[int, object] = {}
        self.failed: pb.Failed | None = None
        self.reply: pb.ReplyStyle | None = None

    def tokens(self, choice: int = 0) -> list[int]:
        return [token_id for _, token_id, _ in self.rows.get(choice, [])]

    def indices(self, choice: int = 0) -> list[int]:
        return [index for index, _, _ in self.rows.get(choice, [])]

    def text(self, choice: int = 0) -> str:
        return "".join(text for _, _, text in self.rows.get(choice, []))


class Link:
    """A router's end."""

    def __init__(self, call) -> None:
        self._call = call
        self._handles = 0
        self.hello: pb.NodeHello | None = None
        self.streams: dict[int, Stream] = {}
        self.beats: list[tuple[float, pb.Beat]] = []
        self.ended: BaseException | None = None
        self._changed = asyncio.Event()
        self._writing = asyncio.Lock()
        self._reader: asyncio.Task | None = None

    async def open(self, router_id: str, model: str) -> None:
        await self._call.write(pb.ConnectRequest(hello=pb.RouterHello(router_id=router_id, model=model)))
        self.hello = (await self._call.read()).hello
        self._reader = asyncio.create_task(self._read())

    async def submit(self, attempt: Attempt, **fields) -> int:
        """The handle of the submitted attempt; `fields` overwrite the message's."""
        self._handles += 1
        submit = attempt_to_wire(attempt, self._handles)
        for name, value in fields.items():
            setattr(submit, name, value)
        return await self.submit_wire(submit)

    async def submit_wire(self, submit: pb.Submit) -> int:
        self._handles = max(self._handles, submit.handle)
        self.streams[submit.handle] = Stream()
        await self._write(pb.ConnectRequest(submit=submit))
        return submit.handle

    async def cancel(self, handle: int) -> None:
        await self._write(pb.ConnectRequest(cancel=pb.Cancel(handle=handle)))

    async def _write(self, request: pb.ConnectRequest) -> None:
        async with self._writing:
            await self._call.write(request)

    async def run(self, attempt: Attempt, timeout_s: float = 30) -> Stream:
        """The whole stream of an attempt, until all choices ended or it failed."""
        handle = await self.submit(attempt)
        unfinished = sum(not choice.finished for choice in attempt.generated)
        return await self.wait(handle, lambda s: s.failed is not None or len(s.finished) == unfinished, timeout_s)

    async def wait(self, handle: int, condition: Callable[[Stream], bool], timeout_s: float = 30) -> Stream:
        stream = self.streams[handle]
        await self.until(lambda: condition(stream), timeout_s)
        return stream

    async def until(self, condition: Callable[[], bool], timeout_s: float = 30) -> None:
        async with asyncio.timeout(timeout_s):
            while not condition():
                assert self.ended is None, self.ended
                self._changed.clear()
                await self._changed.wait()

    async def until_ended(self, timeout_s: float = 10) -> BaseException:
        async with asyncio.timeout(timeout_s):
            while self.ended is None:
                self._changed.clear()
                await self._changed.wait()
        return self.ended

    async def _read(self) -> None:
        try:
            while (frame := await self._call.read()) is not grpc.aio.EOF:
                if frame.HasField("beat"):
                    self.beats.append((time.monotonic(), frame.beat))
                else:
                    self._take(frame.output)
                self._changed.set()
            self.ended = EOFError()
        except (grpc.aio.AioRpcError, asyncio.CancelledError) as error:
            self.ended = error
        self._changed.set()

    def _take(self, output: pb.StepOutput) -> None:
        for accepted in output.accepted:
            self.streams[accepted.handle].prompt_tokens = accepted.prompt_tokens
            self.streams[accepted.handle].reply = accepted.reply if accepted.HasField("reply") else None
        logprobs = dict(zip(output.logprob_row, output.logprobs, strict=True))
        columns = zip(output.handle, output.choice, output.index, output.token_id, output.text, strict=True)
        for row, (handle, choice, index, token_id, text) in enumerate(columns):
            stream = self.streams[handle]
            stream.rows.setdefault(choice, []).append((index, token_id, text))
            if row in logprobs:
                stream.logprobs[choice, index] = logprobs[row]
        for finished in output.finished:
            assert finished.choice not in self.streams[finished.handle].finished
            self.streams[finished.handle].finished[finished.choice] = finished
        for part in output.prompt_parts:
            self.streams[part.handle].prompt_parts.append(part.prompt)
        for failed in output.failed:
            self.streams[failed.handle].failed = failed

    async def close(self) -> None:
        self._call.cancel()
        if self._reader is not None:
            await self._reader


@pytest.fixture
def connect():
    """`async with connect(address) as link`."""

    @asynccontextmanager
    async def open_link(address: str, router_id: str = "router-t", model: str = "") -> AsyncIterator[Link]:
        async with open_channel(address, retries=False) as channel:
            link = Link(WorkerServiceStub(channel).Connect())
            try:
                await link.open(router_id, model)
                yield link
            finally:
                await link.close()

    return open_link


@pytest.fixture
async def link(connect, node):
    async with connect(node.address) as link:
        yield link


@pytest.fixture
def attempt():
    """Makes attempts: a question to the demo model, the sampling's fields by name."""

    def make(question: str = "Count from 1 to 40.", known=None, deadline=None, number=0, prompt=None, **sampling) -> Attempt:
        params = SamplingParams(**{"seed": 7, "temperature": 0.0, **sampling})
        request = GenerationRequest("demo", prompt or ChatPrompt((Message(Role.USER, question),)), params, deadline=deadline)
        generated = known if known is not None else [ChoiceProgress()] * params.n
        return Attempt("generation-t", number, request, tuple(generated))

    return make


@pytest.fixture
def health():
    """What grpc.health.v1 says at an address about a service; with `until` waits for that answer first."""

    async def check(address: str, service: str, until: str = "") -> str:
        async with open_channel(address) as channel, asyncio.timeout(10):
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=service))
            async for answer in watch:
                status = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
                if until in ("", status):
                    watch.cancel()
                    return status
        raise AssertionError("the watch ended")

    return check


@pytest.fixture(scope="session")
def running():
    """Whether a process runs; a zombie does not."""

    def is_running(pid: int) -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        except FileNotFoundError:
            return False

    return is_running


@pytest.fixture
def metrics(node):
    """The shared node's page of metrics, now."""

    async def read() -> str:
        def get() -> str:
            with urllib.request.urlopen(f"http://127.0.0.1:{node.metrics_port}/metrics", timeout=5) as response:
                return response.read().decode()

        return await asyncio.to_thread(get)

    return read


@pytest.fixture
def eventually():
    """Waits until an async condition holds."""

    async def wait(condition, timeout_s: float = 30, what: str = "the condition"):
        deadline = time.monotonic() + timeout_s
        while not (result := await condition()):
            assert time.monotonic() < deadline, f"{what} did not hold within {timeout_s} s"
            await asyncio.sleep(0.02)
        return result

    return wait
