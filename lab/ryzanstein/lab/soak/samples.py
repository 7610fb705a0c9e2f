"""What processes that live through a soak use: memory, files, threads, blocks, shared memory, series."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from prometheus_client.parser import text_string_to_metric_families

from ryzanstein.cli.status.scrape import page

_SHM = Path("/dev/shm")
_BLOCKS = "ryzanstein_worker_kv_blocks_held"
_TIMEOUT_S = 5.0


@dataclass(slots=True)
class Watched:
    """A process of the cluster with all that it started, and the address of its metrics."""

    name: str
    pid: int
    metrics_url: str


@dataclass(slots=True)
class Samples:
    """Values over time by what they are of, such as `router-0 private bytes`. `at_s` are seconds after the start."""

    watched: tuple[Watched, ...]
    at_s: list[float] = field(default_factory=list)
    values: dict[str, list[float]] = field(default_factory=dict)

    def take(self, at_s: float) -> None:
        """Takes one sample of everything. Blocks for some milliseconds, or seconds where a service is silent."""
        found: dict[str, float] = {"/dev/shm bytes": _shm_bytes()}
        for each in self.watched:
            found |= {f"{each.name} {what}": value for what, value in {**_of_processes(each.pid), **_of_metrics(each)}.items()}
        self.at_s.append(at_s)
        for name in {*self.values, *found}:
            row = self.values.setdefault(name, [float("nan")] * (len(self.at_s) - 1))
            row.append(found.get(name, float("nan")))


def _of_processes(pid: int) -> dict[str, float]:
    """Returns the sums over a process and its descendants. Pages that several of them share do not count."""
    try:
        process = psutil.Process(pid)
        family = [process, *process.children(recursive=True)]
        return {
            "private bytes": float(sum(each.memory_full_info().uss for each in family)),
            "files": float(sum(each.num_fds() for each in family)),
            "threads": float(sum(each.num_threads() for each in family)),
            "processes": float(len(family)),
        }
    except psutil.Error:
        return {}


def _of_metrics(watched: Watched) -> Mapping[str, float]:
    try:
        text = page(watched.metrics_url, _TIMEOUT_S)
    except OSError:
        return {}
    families = list(text_string_to_metric_families(text))
    found = {"series": float(sum(len(family.samples) for family in families))}
    if blocks := [sample.value for family in families for sample in family.samples if sample.name == _BLOCKS]:
        found["blocks held"] = sum(blocks)
    return found


def _shm_bytes() -> float:
    total = 0
    for path in _SHM.iterdir():
        try:
            total += path.stat().st_blocks * 512
        except OSError:
            continue
    return float(total)
