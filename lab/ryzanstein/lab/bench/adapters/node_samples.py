"""What nodes have of adapters in memory, once a second: as their metrics say it, and as the kernel sees it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from prometheus_client.parser import text_string_to_metric_families

from ryzanstein.cli.processes.service_process import ServiceProcess
from ryzanstein.cli.status.scrape import page

_EVERY_S = 1.0
_MEMORY = "/memfd:adapter-"
_PREFIX = "ryzanstein_worker_adapter"


@dataclass(slots=True)
class NodeSamples:
    """The largest values of all samples and nodes. `held_bytes` is the memory of packed adapters, evicted ones too."""

    services: Sequence[ServiceProcess]
    adapter_bytes: int = 0
    held_bytes: int = 0
    resident: int = 0
    files: int = 0
    failures: int = 0
    last: dict[str, dict[str, float]] = field(default_factory=dict)

    def take(self) -> None:
        """Takes a sample of every node. Blocks."""
        for service in self.services:
            try:
                found = adapter_figures(service)
                held = held_bytes(service.pid)
                files = psutil.Process(service.pid).num_fds()
            except (OSError, psutil.Error):
                self.failures += 1
                continue
            self.last[service.name] = found
            self.adapter_bytes = max(self.adapter_bytes, int(found.get("adapter_bytes", 0)))
            self.resident = max(self.resident, int(found.get("adapters_resident", 0)))
            self.held_bytes, self.files = max(self.held_bytes, held), max(self.files, files)


@asynccontextmanager
async def sampled(services: Sequence[ServiceProcess]) -> AsyncIterator[NodeSamples]:
    """Yields samples that are taken meanwhile."""
    samples = NodeSamples(services)

    async def take() -> None:
        while True:
            await asyncio.to_thread(samples.take)
            await asyncio.sleep(_EVERY_S)

    task = asyncio.create_task(take())
    try:
        yield samples
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await asyncio.to_thread(samples.take)


def adapter_figures(service: ServiceProcess) -> dict[str, float]:
    """Returns a node's metrics of adapters by the end of their names, such as `adapter_requests_total/hit`. Raises OSError."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(page(service.metrics_url)):
        for sample in family.samples:
            if sample.name.startswith(_PREFIX) and not sample.name.endswith(("_bucket", "_created")):
                label = "".join(f"/{value}" for key, value in sample.labels.items() if key == "outcome")
                name = sample.name.removeprefix("ryzanstein_worker_") + label
                found[name] = found.get(name, 0.0) + sample.value
    return found


def num_series(service: ServiceProcess) -> int:
    """Returns the number of a service's time series. Raises OSError."""
    return sum(len(family.samples) for family in text_string_to_metric_families(page(service.metrics_url)))


def held_bytes(pid: int) -> int:
    """Returns the memory of the packed adapters that a process holds. Raises OSError."""
    held: dict[int, int] = {}
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            if os.readlink(entry).startswith(_MEMORY):
                status = entry.stat()
                held[status.st_ino] = status.st_blocks * 512
        except OSError:  # closed meanwhile
            continue
    return sum(held.values())


def resident_bytes(pid: int) -> int:
    """Returns a process's resident memory."""
    return int(psutil.Process(pid).memory_info().rss)
