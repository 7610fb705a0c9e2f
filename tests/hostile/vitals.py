"""How the processes of a cluster are: alive, their memory and descriptors, and whether their logs are what logs should be."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import psutil

from ryzanstein.cli.processes.cluster import LocalCluster


@dataclass(frozen=True, slots=True)
class Vitals:
    """One process at one moment."""

    pid: int
    resident_bytes: int
    descriptors: int


def vitals(cluster: LocalCluster) -> dict[str, Vitals]:
    """By the name of the service. ServiceFailedError: one has ended."""
    return {name: _vitals(service.pid) for name, service in cluster.services.items() if service.check_running() is None}


def _vitals(pid: int) -> Vitals:
    process = psutil.Process(pid)
    return Vitals(pid, process.memory_info().rss, process.num_fds())


def bad_lines(path: Path) -> list[str]:
    """Of a log: what is no JSON object, and what tells of a traceback."""
    return [line[:400] for line in path.read_text(errors="replace").splitlines() if "Traceback" in line or not _is_record(line)]


def _is_record(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False
