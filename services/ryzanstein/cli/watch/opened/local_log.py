"""The log of a service of `ryzanstein up` on this machine, if it is known to be that service's; else how to read it."""

from __future__ import annotations

import json
from itertools import chain, count, takewhile
from pathlib import Path

from ryzanstein.addresses import is_loopback, split_address
from ryzanstein.cli.logs.command import ELSEWHERE
from ryzanstein.cli.logs.record import read_record
from ryzanstein.observe.log_files import older

_TAIL_BYTES = 256 * 1024
_SHOWN = 500
_SERVING = b'"event": "serving"'


def log_lines(directory: Path | None, node_id: str, address: str) -> list[str]:
    """Returns the last lines of a node's log, the newest last. It reads files, and blocks."""
    path = None if directory is None else _log_of(directory, node_id)
    try:
        if path is None or not path.is_file() or not _serves_at(path, address):
            return elsewhere(directory, node_id)
        lines = _tail(path)
    except OSError as error:
        return [f"{path} cannot be read: {error.strerror}"]
    return [part for line in lines for part in read_record(node_id, line, 0.0).text.splitlines()] or ["it has logged nothing"]


def _tail(path: Path) -> list[str]:
    with path.open("rb") as opened:
        size = opened.seek(0, 2)
        opened.seek(max(0, size - _TAIL_BYTES))
        lines = opened.read().decode(errors="replace").splitlines()
    return lines[(1 if size > _TAIL_BYTES else 0) :][-_SHOWN:]


def elsewhere(directory: Path | None, node_id: str) -> list[str]:
    """Returns what to run where the log is not on this machine, or not known to be this node's."""
    where = "" if directory is None else f" in {directory}"
    return [
        f"No log{where} is known to be that of {node_id}.",
        "",
        "Where `ryzanstein up` runs, with its state directory:",
        f"  ryzanstein logs --node {node_id} --state-dir DIR",
        "On Kubernetes:",
        f"  {ELSEWHERE}",
    ]


def _log_of(directory: Path, node_id: str) -> Path | None:
    """Returns the file of a node's log. None: another machine chose a name that is no file's."""
    return directory / f"{node_id}.log" if node_id and "/" not in node_id and "\0" not in node_id else None


def _serves_at(path: Path, address: str) -> bool:
    """Whether the service of a log serves at an address of this machine: another cluster may have a node of this name."""
    try:
        host, port = split_address(address)
    except ValueError:
        return False
    if not is_loopback(host):
        return False
    names = chain([str(path)], (older(str(path), number) for number in count(1)))
    for name in takewhile(lambda name: Path(name).is_file(), names):
        with open(name, "rb") as opened:
            served = [line for line in opened if _SERVING in line]
        if served:
            return port in _ports(served[-1])
    return False


def _ports(line: bytes) -> set[object]:
    try:
        fields = json.loads(line)
    except ValueError:
        return set()
    return {fields.get("grpc_port"), fields.get("tls_port")} if isinstance(fields, dict) else set()
