"""Checkpoints in the peers' formats.

They are converted once with the peer's own tools and kept with the peers.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Mapping
from pathlib import Path

from ryzanstein.lab.bench.engine.peers.catalog import Format
from ryzanstein.lab.bench.engine.peers.environment import python_of
from ryzanstein.lab.bench.engine.peers.process import PeerFailed

_TIMEOUT_S = 3600.0


def checkpoint_key(model: Path) -> str:
    """Returns a key that changes when the files do.

    It covers the content of the JSON files, and of all others name, size and modification time.
    """
    digest = hashlib.sha256()
    for path in sorted(path for path in model.iterdir() if path.is_file()):
        status = path.stat()
        digest.update(f"{path.name} {status.st_size} ".encode())
        digest.update(path.read_bytes() if path.suffix == ".json" else str(status.st_mtime_ns).encode())
    return f"{model.resolve().name}-{digest.hexdigest()[:16]}"


async def converted(model: Path, wanted: Format, peers_dir: Path, environment: str, variables: Mapping[str, str]) -> Path:
    """Returns the checkpoint in this format, converted if it is missing.

    Raises PeerFailed with the last line of the tool's output.
    """
    path = peers_dir / "models" / checkpoint_key(model) / wanted.name
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{wanted.name}.{os.getpid()}")
    python = python_of(peers_dir, environment)
    names = {"python": str(python), "bin": str(python.parent), "model": str(model), "out": str(unfinished)}
    try:
        await _run([part.format_map(names) for part in wanted.command], variables, f"conversion to {wanted.name}")
        os.replace(unfinished, path)
    finally:
        _remove(unfinished)
    return path


async def _run(command: list[str], variables: Mapping[str, str], purpose: str) -> None:
    process = await asyncio.create_subprocess_exec(*command, stdin=DEVNULL, stdout=DEVNULL, stderr=PIPE, env=variables)
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            last = await _last_line(process)
            code = await process.wait()
    except TimeoutError:
        raise PeerFailed(f"{purpose} did not finish within {_TIMEOUT_S:.0f} s") from None
    finally:
        if process.returncode is None:
            process.kill()
    if code != 0:
        raise PeerFailed(f"{purpose} ended with {code}: {last}")


async def _last_line(process: Process) -> str:
    assert process.stderr is not None
    tail = b""
    while piece := await process.stderr.read(4096):
        tail = (tail + piece)[-4096:]
    return next((line.strip() for line in reversed(tail.decode(errors="replace").split("\n")) if line.strip()), "")


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
