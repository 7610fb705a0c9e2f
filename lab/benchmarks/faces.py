"""Measures what each face costs, for docs/internals/log/measurements.md.

    .venv/bin/python lab/benchmarks/faces.py [--json FILE] [--streams 64] [--seconds 2] [--rounds 5]

Two router processes, one of them with TLS, in front of a scripted node, which offers more tokens than a router can pass on. The
faces take turns within each round: gRPC, server-sent events on a connection per stream, WebSocket with all streams on one
socket, the last two with TLS too, and WebSockets with a socket per stream. The clients are this process; they count tokens in
what arrives and parse no more than they must. Figures are the medians of the rounds, and so are ratios, within each round; the
processor time is the router's alone.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import json
import os
import socket
import ssl
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import uvloop

from ryzanstein.lab.bench.router.load.connections import StreamLoad, connections, connections_for, ready
from ryzanstein.lab.bench.router.load.first_token import first_tokens_s
from ryzanstein.lab.bench.router.scripted.script import WORD, Script
from ryzanstein.lab.bench.router.systems import System, cpu_s, running_node

OFFERED_TOKENS_PER_S = 64_000
TOKENS = 256
WARM_UP_S = 0.3
TLS = ", TLS"
FACES = ("grpc", "sse", f"sse{TLS}", "websocket, one socket", f"websocket, one socket{TLS}", "websocket, a socket per stream")


def body(script: Script) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": repr(script.step_s)}], "max_tokens": script.tokens}


class Counting(asyncio.Protocol):
    """A client that counts tokens and ends in whatever arrives; `again` asks for the next answer."""

    end: bytes
    word = WORD.encode()

    def __init__(self, script: Script, port: int) -> None:
        self.script = script
        self.port = port
        self.tokens = self.asked = self.ended = 0
        self.first = asyncio.get_running_loop().create_future()
        self.stopping = False
        self._tail = b""

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        # What ends in the middle of a word is counted with the next part.
        seen = self._tail + data
        keep = max(len(self.word), len(self.end)) - 1
        tokens = seen.count(self.word) - self._tail.count(self.word)
        self.tokens += tokens
        if tokens and not self.first.done():
            self.first.set_result(time.monotonic())
        ends = seen.count(self.end) - self._tail.count(self.end)
        self._tail = seen[-keep:]
        for _ in range(ends):
            self.ended += 1
            if not self.stopping:
                self.again()

    def again(self) -> None:
        self.asked += 1


class EventClient(Counting):
    end = b"data: [DONE]"

    def again(self) -> None:
        super().again()
        content = json.dumps({**body(self.script), "stream": True}).encode()
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        self.transport.write(head.encode() + b"Content-Length: %d\r\n\r\n" % len(content) + content)


class SocketClient(Counting):
    end = b'"type":"done"'

    def __init__(self, script: Script, port: int) -> None:
        super().__init__(script, port)
        self.open = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        key = base64.b64encode(os.urandom(16)).decode()
        lines = (
            "GET /v1/ws HTTP/1.1",
            "Host: localhost",
            "Connection: Upgrade",
            "Upgrade: websocket",
            f"Sec-WebSocket-Key: {key}",
        )
        lines += ("Sec-WebSocket-Version: 13", "Sec-WebSocket-Protocol: ryzanstein.v1", "", "")
        transport.write("\r\n".join(lines).encode())

    def data_received(self, data: bytes) -> None:
        if not self.open.done():
            assert data.startswith(b"HTTP/1.1 101"), data
            self.open.set_result(None)
            return
        super().data_received(data)

    def again(self) -> None:
        super().again()
        message = {"type": "submit", "id": str(self.asked), "url": "/v1/chat/completions", "body": body(self.script)}
        text = json.dumps(message).encode()
        head = bytes([0x81, 0x80 | len(text)]) if len(text) < 126 else bytes([0x81, 0xFE]) + len(text).to_bytes(2, "big")
        self.transport.write(head + bytes(4) + text)  # a mask of zeros


async def opened(face: str, script: Script, port: int) -> Counting:
    kind = EventClient if face.startswith("sse") else SocketClient
    tls = _trusting() if face.endswith(TLS) else None
    _, client = await asyncio.get_running_loop().create_connection(
        lambda: kind(script, port), "127.0.0.1", port, ssl=tls, server_hostname="localhost" if tls else None
    )
    if isinstance(client, SocketClient):
        await client.open
    return client


def _trusting() -> ssl.SSLContext:
    """A client's TLS. Whom it trusts costs nothing after the handshake."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


@contextlib.asynccontextmanager
async def load_over(face: str, streams: int, grpc_port: int, http_port: int) -> AsyncIterator[Any]:
    """A function that returns the tokens so far."""
    script = Script(TOKENS, streams / OFFERED_TOKENS_PER_S)
    if face == "grpc":
        async with connections(grpc_port, connections_for(streams)) as channels:
            load = StreamLoad(channels, script)
            load.start(streams)
            yield lambda: load.so_far().tokens
            problems = (await load.stop(60)).problems
            assert not problems, problems[:3]
        return
    sockets = 1 if "one socket" in face else streams
    clients = [await opened(face, script, http_port) for _ in range(sockets)]
    for number in range(streams):
        clients[number % sockets].again()
    yield lambda: sum(client.tokens for client in clients)
    for client in clients:
        client.stopping = True
    async with asyncio.timeout(60):
        while sum(client.ended for client in clients) < sum(client.asked for client in clients):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    answers = sum(client.ended for client in clients)
    assert sum(client.tokens for client in clients) == TOKENS * answers, "a token was lost or repeated"
    for client in clients:
        client.transport.abort()


async def throughput(
    face: str, streams: int, seconds: float, ports: tuple[int, int], router: psutil.Process
) -> dict[str, float]:
    async with load_over(face, streams, *ports) as so_far:
        await asyncio.sleep(WARM_UP_S)
        tokens, cpu, began = so_far(), cpu_s(router), time.monotonic()
        await asyncio.sleep(seconds)
        took, tokens = time.monotonic() - began, so_far() - tokens
        cpu = cpu_s(router) - cpu
    return {"tokens_per_s": tokens / took, "router_cpu_us_per_token": 1e6 * cpu / max(1, tokens)}


async def first_tokens_ms(face: str, answers: int, ports: tuple[int, int]) -> float:
    """The median of answers one after another, on one connection."""
    if face == "grpc":
        return 1000 * statistics.median(await first_tokens_s(System("router", ports[0], None), answers))
    client = await opened(face, Script(1), ports[1])
    client.stopping = True
    times = []
    for number in range(answers + answers // 10):
        client.first = asyncio.get_running_loop().create_future()
        began = time.monotonic()
        client.again()
        times.append(await client.first - began)
        while client.ended <= number:  # noqa: ASYNC110
            await asyncio.sleep(0)
    client.transport.abort()
    return 1000 * statistics.median(times[answers // 10 :])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def listening(port: int) -> None:
    for _ in range(600):
        with contextlib.suppress(OSError):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.close()
            return
        await asyncio.sleep(0.05)
    raise TimeoutError(f"nothing listens on {port}")


@dataclass(frozen=True, slots=True)
class Served:
    """A router process and its ports, gRPC's first."""

    ports: tuple[int, int]
    process: psutil.Process


@contextlib.asynccontextmanager
async def router(node_port: int, folder: Path, *extra: str) -> AsyncIterator[Served]:
    """Runs a router in front of the node."""
    ports = free_port(), free_port()
    flags = ("--grpc-port", str(ports[0]), "--http-port", str(ports[1]), "--nodes", f"127.0.0.1:{node_port}")
    flags += ("--state-dir", str(folder), "--session-store", "memory", "--log-level", "warning", *extra)
    process = await asyncio.create_subprocess_exec(sys.executable, "-P", "-m", "ryzanstein.router", *flags)
    try:
        await listening(ports[1])
        yield Served(ports, psutil.Process(process.pid))
    finally:
        process.terminate()
        await process.wait()


def certificate(folder: Path, kind: str = "ec") -> tuple[str, ...]:
    """Returns the flags of a router with a new certificate; `kind` is `ec` (P-256) or `rsa` (2048)."""
    key, chain = folder / f"{kind}.key", folder / f"{kind}.pem"
    new = ("-newkey", "rsa:2048") if kind == "rsa" else ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1")
    command = ("openssl", "req", "-x509", "-nodes", *new, "-days", "1", "-subj", "/CN=localhost")
    command += ("-addext", "subjectAltName=DNS:localhost", "-keyout", str(key), "-out", str(chain))
    subprocess.run(command, check=True, capture_output=True)
    key.chmod(0o600)
    return "--tls-cert", str(chain), "--tls-key", str(key)


async def new_connections(served: Served, count: int, *, tls: bool) -> float:
    """Returns the router's processor time of one request on a new connection, in seconds."""
    context, began = _trusting() if tls else None, cpu_s(served.process)
    for _ in range(count):
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", served.ports[1], ssl=context, server_hostname="localhost" if tls else None
        )
        writer.write(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        await reader.read()
        writer.close()
    return (cpu_s(served.process) - began) / count


async def measured(streams: int, seconds: float, rounds: int) -> dict[str, dict[str, float]]:
    found: dict[str, list[dict[str, float]]] = {face: [] for face in FACES}
    async with running_node() as node, contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        plain = await stack.enter_async_context(router(node.port, folder / "plain"))
        secure = await stack.enter_async_context(router(node.port, folder / "tls", *certificate(folder)))
        await ready(plain.ports[0])
        direct = [1000 * statistics.median(await first_tokens_s(System("direct", node.port, None), 200))]
        for _ in range(rounds):
            for face in FACES:
                served = secure if face.endswith(TLS) else plain
                row = await throughput(face, streams, seconds, served.ports, served.process)
                row["first_token_ms"] = await first_tokens_ms(face, 200, served.ports)
                found[face].append(row)
            direct.append(1000 * statistics.median(await first_tokens_s(System("direct", node.port, None), 200)))
    table = {face: {name: statistics.median(row[name] for row in rows) for name in rows[0]} for face, rows in found.items()}
    for face, row in table.items():
        row["first_token_added_ms"] = row["first_token_ms"] - statistics.median(direct)
        # Round by round, because what else runs on the machine differs from round to round.
        for name in ("tokens_per_s", "router_cpu_us_per_token"):
            row[f"{name}_over_grpc"] = _ratio(found[face], found["grpc"], name)
            row[f"{name}_over_plain"] = _ratio(found[face], found[face.removesuffix(TLS)], name)
    return table


def _ratio(rows: list[dict[str, float]], others: list[dict[str, float]], name: str) -> float:
    return statistics.median(own[name] / other[name] for own, other in zip(rows, others, strict=True))


async def handshakes(count: int, rounds: int) -> dict[str, float]:
    """Returns the router's milliseconds of one request on a new connection: without TLS, and with each kind of key."""
    found: dict[str, list[float]] = {"plain": [], "P-256": [], "RSA-2048": []}
    async with running_node() as node, contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        flags = {"plain": (), "P-256": certificate(folder), "RSA-2048": certificate(folder, "rsa")}
        served = {
            kind: await stack.enter_async_context(router(node.port, folder / kind, *extra)) for kind, extra in flags.items()
        }
        for _ in range(rounds):
            for kind, each in served.items():
                found[kind].append(1000 * await new_connections(each, count, tls=kind != "plain"))
    return {kind: statistics.median(times) for kind, times in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    table = uvloop.run(measured(options.streams, options.seconds, options.rounds))
    connected = uvloop.run(handshakes(200, options.rounds))
    title = (
        f"| face, {options.streams} streams | tokens/s, over gRPC's, over that without TLS | router's CPU per token, the same "
    )
    print(f"{title}| first token | of it added |")
    print("|---|---|---|---|---|")
    for face, row in table.items():
        rate, cost = row["tokens_per_s_over_grpc"], row["router_cpu_us_per_token_over_grpc"]
        first, added = row["first_token_ms"], row["first_token_added_ms"]
        print(
            f"| {face} | {row['tokens_per_s']:,.0f}, {rate:.2f}, {row['tokens_per_s_over_plain']:.2f} "
            f"| {row['router_cpu_us_per_token']:.0f} us, {cost:.2f}, {row['router_cpu_us_per_token_over_plain']:.2f} "
            f"| {first:.2f} ms | {added:.2f} ms |"
        )
    print("\na request on a new connection: " + ", ".join(f"{kind} {time_ms:.2f} ms" for kind, time_ms in connected.items()))
    if options.json:
        options.json.write_text(json.dumps(table | {"new_connection_ms": connected}, indent=2))


if __name__ == "__main__":
    main()
