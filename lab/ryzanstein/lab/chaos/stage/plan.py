"""From a layout to what has to be started.

That is hosts, programs besides the services, and the cluster's specification.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from ryzanstein.cli.access.local_key import LocalKey
from ryzanstein.cli.processes.cluster import ORCHESTRATOR, OWN_RANKS, ClusterSpec
from ryzanstein.cli.processes.host import LOCAL, Host
from ryzanstein.cli.processes.ports import free_ports
from ryzanstein.demo import MODEL_DIR
from ryzanstein.files.named_paths import write_setting
from ryzanstein.files.private_files import private_folder
from ryzanstein.lab.chaos.machines.clocks import Clocks
from ryzanstein.lab.chaos.machines.delayed import DelayedNode
from ryzanstein.lab.chaos.machines.fast_clock import FastClock
from ryzanstein.lab.chaos.machines.llama.server import LlamaServer, llama_file
from ryzanstein.lab.chaos.machines.network import HostNetwork
from ryzanstein.lab.chaos.machines.preloaded import INJECTION_DIR
from ryzanstein.lab.chaos.machines.redis_server import RedisServer
from ryzanstein.lab.chaos.machines.small_disk import SmallDisk
from ryzanstein.lab.chaos.stage.layouts import ClusterLayout
from ryzanstein.lab.chaos.stage.pace import FastPace
from ryzanstein.lab.chaos.stage.random_adapter import random_adapter
from ryzanstein.lab.chaos.stage.random_model import random_model

REDIS = "redis"
# Thirty strikes in a row are the laboratory's doing: they must not look like a crash loop.
_RECOVERY = {"crash_limit": 100_000, "loss_limit": 100_000, "first_s": 0.05, "longest_s": 0.05}
_WORKER_FLAGS = ("--tuning", json.dumps({"recovery": _RECOVERY}))
_DISK_FLAGS = ("--kv-disk-bytes", str(2**23))  # of each node; together less than the small disk has


class Startable(Protocol):
    """A program besides the services."""

    def start(self) -> None: ...

    def kill(self) -> None: ...


@dataclass(frozen=True, slots=True)
class TrialPlan:
    """What to start for a layout. None or empty: the layout has none.

    `delayed` and `servers` are by node id. `sessions` is the directory of the routers' databases, on `disk`, and
    `pages` that of the nodes' pages, on `pages_disk`.
    """

    layout: ClusterLayout
    network: HostNetwork | None
    spec: ClusterSpec
    redis: RedisServer | None
    delayed: dict[str, DelayedNode]
    clocks: Clocks | None
    fast_clock: FastClock | None
    pace: FastPace | None
    sessions: Path
    disk: SmallDisk | None
    pages: Path
    pages_disk: SmallDisk | None
    servers: dict[str, LlamaServer]

    @property
    def children(self) -> list[Startable]:
        """Returns what has to run before the cluster."""
        return [*([self.redis] if self.redis is not None else []), *self.delayed.values(), *self.servers.values()]

    def host_name(self, service: str) -> str:
        """Returns the network's name for the host of a service."""
        return f"{self.layout.name}-{service}"

    def remove_hosts(self) -> None:
        """Removes the hosts, after everything on them has ended."""
        if self.network is not None:
            for name in [name for name in self.network.hosts if name.startswith(f"{self.layout.name}-")]:
                self.network.remove(name)


def plan(layout: ClusterLayout, network: HostNetwork | None, directory: Path) -> TrialPlan:
    """Creates the hosts and the further models; starts nothing. `network` None: all is on 127.0.0.1.

    Raises ServiceFailedError if a model cannot be made.
    """
    state_dir, sessions, pages = directory / "state", directory / "sessions", directory / "pages"
    sessions.mkdir()
    pages.mkdir()
    nodes = [f"node-{i}" for i in range(layout.nodes)]
    routers = [f"router-{i}" for i in range(layout.routers)]
    clocks = Clocks(directory / "clocks") if layout.faked_clocks else None
    fast_clock = FastClock(directory / "clocks") if layout.fast_clock else None
    pace = FastPace(directory / "pace") if layout.step_s else None
    names = [ORCHESTRATOR, *nodes, *routers]
    hosts = {
        name: _host(network, f"{layout.name}-{name}", _environment(layout, name, clocks, fast_clock, pace)) for name in names
    }
    redis = RedisServer(_host(network, f"{layout.name}-{REDIS}", {}), directory / REDIS) if layout.redis else None
    delayed = (
        {node: DelayedNode(hosts[node], directory / f"{node}.proxy.log", secure=layout.secure) for node in nodes}
        if layout.proxied
        else {}
    )
    servers = _servers(layout, {node: hosts[node] for node in nodes[: layout.servers]}, directory / "servers")
    key = _key(state_dir) if layout.secure else None
    router_flags = ("--session-store", "redis", "--redis-url", redis.url) if redis is not None else ()
    spec = ClusterSpec(
        random_model(directory / "models" / "context", "context") if layout.context else MODEL_DIR,
        num_nodes=layout.nodes,
        num_routers=layout.routers,
        more_models=tuple(random_model(directory / "models" / name) for name in layout.further_models),
        tp=layout.tp,
        state_dir=state_dir,
        worker_flags=(*_WORKER_FLAGS, *_more_flags(layout, directory, pages)),
        router_flags=(*router_flags, *(("--keys-file", str(key.keys_file)) if key is not None else ())),
        engines=tuple(servers[node].url if node in servers else OWN_RANKS for node in nodes) if servers else (),
        secure=layout.secure,
        api_key=key.key if key is not None else "",
        api_key_file=key.path if key is not None else None,
        hosts=hosts,
        settings={
            **{node: each.settings for node, each in delayed.items()},
            **{router: {"session_dir": str(sessions)} for router in routers},
        },
    )
    disk = SmallDisk(sessions) if network is not None else None
    pages_disk = SmallDisk(pages) if network is not None and layout.tiers else None
    return TrialPlan(
        layout, network, spec, redis, delayed, clocks, fast_clock, pace, sessions, disk, pages, pages_disk, servers
    )


def _more_flags(layout: ClusterLayout, directory: Path, pages: Path) -> tuple[str, ...]:
    """Returns what a node is told besides. Makes the adapters."""
    adapters = [(name, random_adapter(directory / "adapters" / name, MODEL_DIR)) for name in layout.adapters]
    return (
        *(("--kv-disk-dir", str(pages), *_DISK_FLAGS) if layout.tiers else ()),
        *(("--adapters", write_setting(adapters)) if adapters else ()),
    )


def _servers(layout: ClusterLayout, hosts: dict[str, Host], directory: Path) -> dict[str, LlamaServer]:
    """Returns the servers beside these nodes. Raises ServiceFailedError if their model cannot be written."""
    if not hosts:
        return {}
    directory.mkdir()
    path = llama_file(directory)
    ports = dict(zip(hosts, free_ports(len(hosts)), strict=True))
    return {node: LlamaServer(host, path, directory / f"{node}.log", ports[node]) for node, host in hosts.items()}


def _key(state_dir: Path) -> LocalKey:
    """Makes the key of all clients, as `ryzanstein up --secure` does."""
    private_folder(state_dir)
    return LocalKey.kept(state_dir)


def _environment(
    layout: ClusterLayout, name: str, clocks: Clocks | None, fast_clock: FastClock | None, pace: FastPace | None
) -> dict[str, str]:
    environment = clocks.environment(name) if clocks is not None else {}
    if fast_clock is not None:
        environment |= fast_clock.environment()
    if name.startswith("node-") and (layout.saboteur or pace is not None):
        environment["PYTHONPATH"] = str(INJECTION_DIR)
    if name.startswith("node-") and pace is not None:
        environment |= pace.environment()
    return environment


def _host(network: HostNetwork | None, name: str, environment: dict[str, str]) -> Host:
    """Returns a host. Without a network, the environment still needs a command prefix."""
    if network is not None:
        return network.add(name, **environment)
    if not environment:
        return LOCAL
    return replace(LOCAL, prefix=("/usr/bin/env", *(f"{key}={value}" for key, value in environment.items())))
