"""A zip file with what one needs of a cluster to find out what was wrong with it. It has no secrets and no prompts."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile

from ryzanstein.cli.debug.evidence import Evidence, as_dict
from ryzanstein.cli.debug.report import everything, headlines
from ryzanstein.cli.logs.reading import service_names
from ryzanstein.cli.processes.service_log import ServiceLog

MAX_LOG_LINES = 2000
_LOG_BYTES = 8 * 2**20


def write_bundle(path: Path, status: Mapping[str, object], all_evidence: Sequence[Evidence], logs: Path | None) -> int:
    """Writes the bundle, which only its owner may read, and returns its size. Raises OSError, also where there is one."""
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    with os.fdopen(descriptor, "w+b") as file, ZipFile(file, "w", ZIP_DEFLATED) as bundle:
        for name, text in _files(status, all_evidence, logs):
            bundle.writestr(name, text)
    return path.stat().st_size


def _files(status: Mapping[str, object], all_evidence: Sequence[Evidence], logs: Path | None) -> Iterator[tuple[str, str]]:
    yield "summary.txt", "\n".join([time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), *headlines(all_evidence), ""])
    yield "status.json", json.dumps(status, indent=2)
    for each in all_evidence:
        yield from _of_service(each, each.name.replace("/", "_"))
    for name in [] if logs is None else service_names(logs):
        lines = ServiceLog(logs / f"{name}.log").tail(MAX_LOG_LINES, _LOG_BYTES) if logs is not None else []
        yield f"logs/{name}.jsonl", "\n".join([*lines, ""])


def _of_service(evidence: Evidence, folder: str) -> Iterator[tuple[str, str]]:
    if evidence.error:
        yield f"{folder}/error.txt", evidence.error
    yield f"{folder}/requests.json", json.dumps([as_dict(each) for each in evidence.requests], indent=2)
    if evidence.stacks is not None:
        yield f"{folder}/stacks.txt", "\n".join([*everything(evidence), ""])
    if (diagnostics := evidence.diagnostics) is not None:
        yield f"{folder}/versions.json", json.dumps(dict(diagnostics.versions), indent=2, sort_keys=True)
        yield f"{folder}/settings.json", json.dumps(json.loads(diagnostics.settings), indent=2, sort_keys=True)
        yield f"{folder}/metrics.txt", diagnostics.metrics
