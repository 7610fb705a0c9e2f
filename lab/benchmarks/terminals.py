"""What `chat` and `status --watch` cost at a terminal: the share of a core, and the bytes that they paint.

`.venv/bin/python lab/benchmarks/terminals.py [--seconds 20] [--json FILE]`. A router of the benchmark's own streams an answer
in Markdown at 200 tokens/s, and links 100 nodes; an orchestrator of its own names them. All answer, and have other loads each
time. All of them are in another process. What is measured is the CPU time of the program at a pseudo-terminal of 120x40, after
its start.
"""

from __future__ import annotations

import argparse
import fcntl
import itertools
import json
import os
import pty
import random
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import psutil

from ryzanstein.lab.machine import machine
from ryzanstein.v1 import inference_pb2 as pb
from ryzanstein.v1 import orchestrator_pb2, orchestrator_pb2_grpc, router_pb2, worker_pb2, worker_pb2_grpc
from ryzanstein.v1.inference_pb2_grpc import InferenceServiceServicer, add_InferenceServiceServicer_to_server
from ryzanstein.v1.router_pb2_grpc import RouterServiceServicer, add_RouterServiceServicer_to_server

TOKENS, TOKENS_PER_S, NODES = 20_000, 200, 100
COLUMNS, LINES = 120, 40
SETTLED_S = 3.0
_WORDS = ("the", "node", "of", "a", "`rank`", "waits", "for **its** peers", "and", "goes on,", "then", "it is silent.")


def tokens() -> Iterator[str]:
    """Yields the tokens of a long answer: paragraphs, lists and code."""
    rng = random.Random(1)
    for number in itertools.count():
        lead = ("", "- ", "```python\n", "## ")[number % 4]
        yield f"\n\n{lead}"
        for _ in range(12 if lead == "## " else 80):
            yield f"{rng.choice(_WORDS)} "
        if "`" in lead:
            yield "\n```"


class SlowRouter(InferenceServiceServicer):
    """Streams one token a message."""

    def ListModels(self, request: Any, context: Any) -> pb.ListModelsResponse:
        return pb.ListModelsResponse(models=[pb.Model(name="demo", context_length=8192, ready_nodes=NODES)])

    def StreamChat(self, request: Any, context: Any) -> Iterator[pb.StreamChatResponse]:
        started = pb.GenerationStarted(generation_id="g", model="m", node_id="node-0")
        yield pb.StreamChatResponse(event=pb.GenerationEvent(started=started))
        began = time.monotonic()
        for index, text in enumerate(itertools.islice(tokens(), TOKENS)):
            time.sleep(max(0.0, began + index / TOKENS_PER_S - time.monotonic()))
            delta = pb.GenerationDelta(first_index=index, token_ids=[index], text=text, node_id="node-0")
            yield pb.StreamChatResponse(event=pb.GenerationEvent(delta=delta))
        finished = pb.GenerationFinished(finish_reason=pb.FINISH_REASON_STOP)
        yield pb.StreamChatResponse(event=pb.GenerationEvent(finished=finished))


class LinkingRouter(RouterServiceServicer):
    """Has a stream to each node."""

    def __init__(self, addresses: list[str]) -> None:
        self._addresses, self._asked = addresses, itertools.count(1)

    def GetRouterStatus(self, request: Any, context: Any) -> router_pb2.GetRouterStatusResponse:
        asked = next(self._asked)
        links = [
            router_pb2.LinkStatus(
                node_id=f"node-{number}",
                address=address,
                up=True,
                breaker=router_pb2.BREAKER_STATE_CLOSED,
                inflight=(asked + number) % 17,
                state=worker_pb2.NODE_STATE_READY,
            )
            for number, address in enumerate(self._addresses, 1)
        ]
        figures = router_pb2.RouterFigures(generated_tokens=asked * 5000, running=asked % 50)
        return router_pb2.GetRouterStatusResponse(router_id="router-0", links=links, figures=figures)


class BusyNode(worker_pb2_grpc.WorkerServiceServicer):
    """Reports a node whose figures are others each time."""

    def __init__(self) -> None:
        self._asked = itertools.count(1)

    def GetStatus(self, request: Any, context: Any) -> worker_pb2.GetStatusResponse:
        asked = next(self._asked)
        beat = worker_pb2.Beat(
            state=worker_pb2.NODE_STATE_READY,
            model="demo",
            context_length=8192,
            load=worker_pb2.Load(
                running=asked % 17, capacity=64, waiting=asked % 5, kv_blocks_total=4096, kv_blocks_used=asked % 4096
            ),
        )
        ranks = [worker_pb2.RankStatus(rank=rank, pid=100 + rank, phase="step", step=asked) for rank in range(2)]
        figures = worker_pb2.EngineFigures(decode_tokens=asked * 50, prefill_tokens=asked * 200)
        return worker_pb2.GetStatusResponse(node_id="node", beat=beat, ranks=ranks, figures=figures)


class WideOrchestrator(orchestrator_pb2_grpc.OrchestratorServiceServicer):
    """Names nodes that are all ready."""

    def __init__(self, addresses: list[str]) -> None:
        self._addresses, self._asked = addresses, itertools.count(1)

    def ListNodes(self, request: Any, context: Any) -> orchestrator_pb2.ListNodesResponse:
        asked = next(self._asked)
        response = orchestrator_pb2.ListNodesResponse()
        for number, address in enumerate(self._addresses, 1):
            load = worker_pb2.Load(
                running=(asked + number) % 17, capacity=64, kv_blocks_total=4096, kv_blocks_used=(asked * number) % 4096
            )
            node = response.nodes.add(
                node_id=f"node-{number}",
                address=address,
                tp=2,
                state=worker_pb2.NODE_STATE_READY,
                model="demo",
                context_length=8192,
                load=load,
            )
            node.beat_time.GetCurrentTime()
            node.models.add(model="demo", state=worker_pb2.NODE_STATE_READY, load=load, memory_bytes=2**30)
        return response


def serve() -> None:
    """Serves until standard input ends. Prints the address of the router, and of the orchestrator."""
    server = grpc.server(ThreadPoolExecutor(16))
    ports = [server.add_insecure_port("127.0.0.1:0") for _ in range(NODES + 1)]
    addresses = [f"127.0.0.1:{port}" for port in ports]
    add_InferenceServiceServicer_to_server(SlowRouter(), server)  # type: ignore[abstract]
    add_RouterServiceServicer_to_server(LinkingRouter(addresses[1:]), server)  # type: ignore[abstract]
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(BusyNode(), server)  # type: ignore[abstract]
    orchestrator_pb2_grpc.add_OrchestratorServiceServicer_to_server(WideOrchestrator(addresses[1:]), server)  # type: ignore[abstract]
    server.start()
    print(addresses[0], flush=True)
    sys.stdin.read()
    server.stop(0).wait()


class Terminal:
    """A program at a pseudo-terminal. `painted` counts the bytes that it wrote; `tail` is the end of them."""

    def __init__(self, command: list[str], home: str) -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
        environment = {**os.environ, "TERM": "xterm-256color", "XDG_STATE_HOME": home}
        for name in ("COLUMNS", "LINES", "NO_COLOR"):
            environment.pop(name, None)
        self.process = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, env=environment, start_new_session=True
        )
        os.close(slave)
        self.painted, self.tail = 0, b""
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        while True:
            try:
                piece = os.read(self._master, 65536)
            except OSError:
                return
            if b"\x1b[6n" in piece:
                self.type("\x1b[1;1R")  # where the cursor is
            self.painted += len(piece)
            self.tail = (self.tail + piece)[-100_000:]

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def wait(self, condition: Callable[[bytes], bool]) -> None:
        deadline = time.monotonic() + 60
        while not condition(self.tail):
            assert time.monotonic() < deadline, self.tail[-2000:]
            time.sleep(0.05)

    def measured(self, seconds: float) -> dict[str, float]:
        """Returns what it does from now on."""
        program, painted = psutil.Process(self.process.pid), self.painted
        before, began = program.cpu_times(), time.monotonic()
        time.sleep(seconds)
        after, took_s = program.cpu_times(), time.monotonic() - began
        used_s = after.user + after.system - before.user - before.system
        return {
            "core_percent": round(100 * used_s / took_s, 1),
            "painted_bytes_per_s": round((self.painted - painted) / took_s),
            "resident_mib": round(program.memory_info().rss / 2**20, 1),
        }

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)


@contextmanager
def terminal(*arguments: str) -> Iterator[Terminal]:
    with tempfile.TemporaryDirectory() as home:
        opened = Terminal([str(Path(sys.executable).parent / "ryzanstein"), *arguments], home)
        try:
            yield opened
        finally:
            opened.close()


def chat(address: str, seconds: float) -> dict[str, float]:
    with terminal("chat", "--router", address) as opened:
        opened.wait(lambda tail: b"you" in tail)
        opened.type("Tell me.\r")
        opened.wait(lambda tail: b"rank" in tail)
        time.sleep(SETTLED_S)
        return opened.measured(seconds)


def watch(address: str, seconds: float) -> dict[str, float]:
    with terminal("status", "--watch", "--router", address, "--orchestrator", address) as opened:
        opened.wait(lambda tail: b"node-1" in tail)
        time.sleep(SETTLED_S)
        return opened.measured(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve()
        return
    servers = subprocess.Popen(
        [sys.executable, "-P", __file__, "--serve"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with servers:
        assert servers.stdout is not None
        address = servers.stdout.readline().strip()
        found = {
            "machine": machine(),
            f"chat_at_{TOKENS_PER_S}_tokens_per_s": chat(address, options.seconds),
            f"watch_of_{NODES}_nodes": watch(address, options.seconds),
        }
        assert servers.stdin is not None
        servers.stdin.close()
    text = json.dumps(found, indent=1)
    print(text)
    if options.json is not None:
        options.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
