"""Looks for secrets where they do not belong: in files of state, logs, metrics, and the arguments of processes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import psutil

from ryzanstein.auth.key_form import ApiKey
from ryzanstein.cli.status.scrape import page
from ryzanstein.lab.chaos.stage.stage import Stage

_TIMEOUT_S = 5.0
_KEY_FILES = ("tls.key", "ca.key")


async def exposures(stage: Stage) -> list[str]:
    """Returns the places that have a secret of a secure cluster; none of one that has no secrets.

    The secrets are that of the clients' key, and the private halves of the keys of certificates.
    """
    if not stage.layout.secure:
        return []
    return await asyncio.to_thread(lambda: list(_exposures(stage)))


def _exposures(stage: Stage) -> Iterator[str]:
    state = stage.cluster.state_dir
    own = {path for name in _KEY_FILES for path in state.rglob(name)}
    # The public half, which certificates have too, begins in the third line.
    secrets = {line for path in own for line in path.read_bytes().splitlines()[1:3]}
    if (key := ApiKey.parse(stage.cluster.spec.api_key)) is not None:
        secrets.add(key.secret.encode())
    if (kept := stage.cluster.spec.api_key_file) is not None:
        own.add(kept)
    for path in state.parent.rglob("*"):
        if path.is_file() and path not in own and _has(_content(path), secrets):
            yield str(path.relative_to(state.parent))
    for service in stage.cluster.services.values():
        if not service.running:
            continue
        if _has(_metrics(service.metrics_url), secrets):
            yield f"the metrics of {service.name}"
        if _has(_arguments(service.pid), secrets):
            yield f"the arguments of {service.name}"


def _has(content: bytes, secrets: set[bytes]) -> bool:
    return any(secret in content for secret in secrets)


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # removed meanwhile
        return b""


def _metrics(url: str) -> bytes:
    try:
        return page(url, _TIMEOUT_S).encode()
    except OSError:
        return b""


def _arguments(pid: int) -> bytes:
    try:
        process = psutil.Process(pid)
        return "\n".join(" ".join(each.cmdline()) for each in (process, *process.children(recursive=True))).encode()
    except psutil.Error:
        return b""
