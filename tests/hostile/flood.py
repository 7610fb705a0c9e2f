"""`python -m tests.hostile.flood --inputs 20000`: random malformed inputs over every port of a cluster.

Starts an orchestrator, a node and a router, floods gRPC ports of all three, the HTTP port and the metrics ports, and reports
what came of it. Exit code 1: a process was lost, a traceback or a line that is no JSON was written, an answer said that
something broke, or memory or descriptors grew.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from random import Random
from urllib.parse import urlsplit

import grpc
from tests.hostile.garbage import garbage, send
from tests.hostile.grpc_calls import BROKEN, outcome
from tests.hostile.grpc_corpus import FILES, Method, methods, random_messages
from tests.hostile.vitals import Vitals, bad_lines, vitals

from ryzanstein.cli.processes.cluster import ClusterSpec, LocalCluster
from ryzanstein.demo import MODEL_DIR

AT_ONCE = 16
WARM_UP = 0.2
MAX_GROWTH_BYTES = 48 * 2**20
MAX_NEW_DESCRIPTORS = 8
_SETTLE_S = 30.0
_SERVICES = {"router": "router-0", "orchestrator": "orchestrator", "worker": "node-0"}
# Of these there are good ones among the bad, after which a node takes nothing more, and says so rightly.
_HARD_TO_SURVIVE = ("/Drain", "/DrainNode", "/UnloadModel")

Input = Callable[[], Awaitable[str]]
"""Sends one and says how it ended; what begins with "broken" should not be."""


@dataclass
class Report:
    """What a flood did."""

    outcomes: Counter[str] = field(default_factory=Counter)
    before: dict[str, Vitals] = field(default_factory=dict)
    after: dict[str, Vitals] = field(default_factory=dict)
    bad_lines: dict[str, list[str]] = field(default_factory=dict)

    @property
    def inputs(self) -> int:
        return self.outcomes.total()

    def violations(self) -> list[str]:
        found = [f"{kind}: {count}" for kind, count in self.outcomes.items() if kind.startswith("broken")]
        found += [f"{name} wrote {len(lines)} bad lines, first {lines[0]}" for name, lines in self.bad_lines.items() if lines]
        for name, before in self.before.items():
            after = self.after[name]
            if after.pid != before.pid:
                found.append(f"{name} was lost")
            if after.resident_bytes - before.resident_bytes > MAX_GROWTH_BYTES:
                found.append(f"{name} grew by {(after.resident_bytes - before.resident_bytes) / 2**20:.0f} MiB")
            if after.descriptors - before.descriptors > MAX_NEW_DESCRIPTORS:
                found.append(f"{name} has {after.descriptors - before.descriptors} more descriptors")
        return found

    def text(self) -> str:
        lines = [f"{self.inputs} inputs", *(f"  {kind:40} {count}" for kind, count in sorted(self.outcomes.items()))]
        lines.append(f"{'process':16}{'MiB before':>12}{'MiB after':>12}{'fds before':>12}{'fds after':>12}{'bad lines':>12}")
        for name, before in self.before.items():
            after = self.after[name]
            sizes = f"{before.resident_bytes / 2**20:>12.1f}{after.resident_bytes / 2**20:>12.1f}"
            lines.append(f"{name:16}{sizes}{before.descriptors:>12}{after.descriptors:>12}{len(self.bad_lines[name]):>12}")
        return "\n".join(lines)


class Flood:
    """Inputs to the ports of one cluster, drawn by one seed."""

    def __init__(self, cluster: LocalCluster, channels: dict[str, grpc.aio.Channel], seed: int) -> None:
        self._cluster = cluster
        self._channels = channels
        self._random = Random(seed)
        self._methods = [each for service in FILES for each in methods(service) if not each.path.endswith(_HARD_TO_SURVIVE)]
        http = urlsplit(cluster.http_url).netloc
        metrics = [urlsplit(service.metrics_url).netloc for service in cluster.services.values()]
        self._grpc_ports = [service.grpc_address for service in cluster.services.values()]
        self._other_ports = [http, http, *metrics]

    def next(self) -> Input:
        drawn = self._random.random()
        if drawn < 0.6:
            method = self._random.choice(self._methods)
            (data,) = random_messages(method, 1, self._random.getrandbits(64))
            return lambda: self._call(method, data)
        address, data = self._random.choice(self._grpc_ports if drawn < 0.75 else self._other_ports), garbage(self._random)
        return lambda: self._send(address, data)

    async def _call(self, method: Method, data: bytes) -> str:
        code = await outcome(self._channels[method.service], method, data)
        return f"broken {method.path} {code.name}" if code in BROKEN else f"grpc {code.name}"

    async def _send(self, address: str, data: bytes) -> str:
        host, _, port = address.rpartition(":")
        answer = await send(host, int(port), data)
        if not answer.startswith(b"HTTP/1.1 ") and not answer.startswith(b"HTTP/1.0 "):
            return "tcp answered" if answer else "tcp closed"
        code = answer[9:12].decode(errors="replace")
        # The standard library's server of metrics answers 501 to methods that it does not have.
        return f"broken http {code}" if code.startswith("5") and code != "501" else f"http {code}"


async def flood(cluster: LocalCluster, inputs: int, seed: int) -> Report:
    """Warms up with a fifth of the inputs, so that what is made once is there, then compares."""
    report = Report()
    options = (("grpc.use_local_subchannel_pool", 1),)
    channels = {
        service: grpc.aio.insecure_channel(cluster.services[name].grpc_address, options=options)
        for service, name in _SERVICES.items()
    }
    flood = Flood(cluster, channels, seed)
    try:
        await _pour(flood, round(inputs * WARM_UP), report.outcomes)
        report.before = vitals(cluster)
        await _pour(flood, inputs - round(inputs * WARM_UP), report.outcomes)
        report.after = await _settled(cluster, report.before)
    finally:
        for channel in channels.values():
            await channel.close()
    report.bad_lines = {name: bad_lines(service.log_path) for name, service in cluster.services.items()}
    return report


async def _pour(flood: Flood, inputs: int, outcomes: Counter[str]) -> None:
    left = iter(range(inputs))

    async def one_after_the_other() -> None:
        for _ in left:
            outcomes[await flood.next()()] += 1

    await asyncio.gather(*(one_after_the_other() for _ in range(AT_ONCE)))


async def _settled(cluster: LocalCluster, before: dict[str, Vitals]) -> dict[str, Vitals]:
    """When connections that were left in the middle are gone, or after a while."""
    until = time.monotonic() + _SETTLE_S
    while True:
        now = vitals(cluster)
        if all(now[name].descriptors <= vital.descriptors for name, vital in before.items()) or time.monotonic() > until:
            return now
        await asyncio.sleep(0.5)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=13)
    arguments = parser.parse_args()
    with LocalCluster(ClusterSpec(MODEL_DIR, num_nodes=1, tp=1)) as cluster:
        report = asyncio.run(flood(cluster, arguments.inputs, arguments.seed))
    print(report.text())
    for violation in report.violations():
        print(f"VIOLATION {violation}")
    return 1 if report.violations() else 0


if __name__ == "__main__":
    sys.exit(main())
