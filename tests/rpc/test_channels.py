"""No connection between services, or from the command line to one, goes through a proxy."""

from __future__ import annotations

import ast
import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from ryzanstein.cli.processes.service_process import serves
from ryzanstein.cli.status import scrape
from ryzanstein.observe.metrics import MetricsServer, new_registry
from ryzanstein.observe.tracing import Tracing
from ryzanstein.rpc.client import open_channel
from ryzanstein.rpc.server import RpcServer

ROOT = Path(__file__).parents[2]
NAMES = [name for kind in ("http", "https", "grpc", "all") for name in (f"{kind}_proxy", f"{kind}_PROXY".upper())]

# What opens connections with the environment's proxies unless told otherwise, and the modules that tell it.
OPENS = {
    "insecure_channel",
    "secure_channel",
    "urlopen",
    "build_opener",
    "OTLPSpanExporter",
    "Client",
    "AsyncClient",
    "ClientSession",
}
DIRECT = {
    "shared/ryzanstein/rpc/client.py": {"insecure_channel", "secure_channel"},
    "shared/ryzanstein/observe/tracing.py": {"OTLPSpanExporter"},
    "shared/ryzanstein/survey/reach.py": {"insecure_channel", "secure_channel"},  # with `client_options`
    "services/ryzanstein/cli/access/router_trust.py": {"secure_channel"},  # with `CLIENT_OPTIONS`
    "services/ryzanstein/console/login.py": {"AsyncClient"},  # ours
    "services/ryzanstein/cli/status/scrape.py": {"build_opener"},
    "lab/benchmarks/console.py": {"build_opener"},
    "clients/python/ryzanstein/client/transport.py": {"insecure_channel", "secure_channel"},  # with its own `OPTIONS`
    "services/ryzanstein/router/access/oidc/provider.py": {"build_opener"},  # an issuer is outside: by the proxy
    "services/ryzanstein/worker/engines/remote/http/client.py": {"ClientSession"},  # trust_env=False
    "lab/benchmarks/beside_vllm.py": {"ClientSession"},  # of its own accord
    "lab/benchmarks/client.py": {"insecure_channel", "AsyncClient", "Client"},  # with `transport.OPTIONS`; the latter are ours
    "lab/benchmarks/embeddings.py": {"Client"},  # trust_env=False
}
LIBRARIES = {"grpc", "httpx", "urllib", "websockets", "requests", "aiohttp", "opentelemetry", "http"}


@pytest.fixture
async def proxied(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[object]]:
    """Names a proxy in every spelling. Yields the connections that it got."""
    came: list[object] = []

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        came.append(await reader.readline())
        writer.close()

    proxy = await asyncio.start_server(accept, "127.0.0.1", 0)
    for name in NAMES:
        monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.sockets[0].getsockname()[1]}")
    yield came
    proxy.close()


@pytest.fixture
async def server() -> Iterator[str]:
    server = RpcServer("127.0.0.1", 0, [])
    await server.start()
    await server.set_ready(True)
    yield f"127.0.0.1:{server.port}"
    await server.stop(0)


async def test_channels_and_pages_are_direct_whatever_proxy_the_environment_names(proxied: list[object], server: str) -> None:
    metrics = MetricsServer(new_registry(), "127.0.0.1", 0)
    try:
        async with open_channel(server) as channel:
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
        assert await asyncio.to_thread(serves, server, timeout_s=5)
        assert "process_" in await asyncio.to_thread(scrape.page, f"http://127.0.0.1:{metrics.port}/metrics")
    finally:
        metrics.close()
    tracing = Tracing("router", server)
    with tracing.span("traced"):
        pass
    await asyncio.to_thread(tracing.close)
    assert proxied == []


def test_connections_are_opened_where_no_proxy_is_used() -> None:
    folders = (ROOT / "services", ROOT / "shared", ROOT / "lab", ROOT / "clients" / "python")
    modules = [path for folder in folders for path in folder.rglob("*.py")]
    found = {str(path.relative_to(ROOT)): opened for path in modules if (opened := _opened(path))}
    found.pop("lab/ryzanstein/lab/simulation/rpc/__init__.py", None)
    assert found == DIRECT


def _opened(path: Path) -> set[str]:
    """Returns what a module calls of OPENS, if it imports one of the libraries that have proxies."""
    tree = ast.parse(path.read_text())
    nodes = list(ast.walk(tree))
    imported = {name.name for node in nodes if isinstance(node, ast.Import) for name in node.names}
    imported |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    if not LIBRARIES & {name.split(".")[0] for name in imported}:
        return set()
    calls = (node.func for node in nodes if isinstance(node, ast.Call))
    return {call.attr if isinstance(call, ast.Attribute) else getattr(call, "id", "") for call in calls} & OPENS
