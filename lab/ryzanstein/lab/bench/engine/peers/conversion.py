"""Checkpoints in the peers' formats.

They are converted once, with the peer's own tools or with ours, and kept with the peers.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Mapping
from pathlib import Path

from ryzanstein import errors
from ryzanstein.lab.bench.engine.peers.catalog import Format, gguf
from ryzanstein.lab.bench.engine.peers.environment import python_of
from ryzanstein.lab.bench.engine.peers.process import PeerFailed
from ryzanstein.tools.convert.from_checkpoint import WRITTEN

_TIMEOUT_S = 3600.0


def checkpoint_key(model: Path) -> str:
    """Returns a key that changes when the files do.

    It covers the content of the JSON files, and of all others name, size and modification time.
    """
    digest = hashlib.sha256()
    files = sorted(path for path in model.iterdir() if path.is_file()) if model.is_dir() else [model]
    for path in files:
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
    names = {
        "python": str(python),
        "bin": str(python.parent),
        "own": sys.executable,
        "model": str(model),
        "out": str(unfinished),
    }
    try:
        await _run([part.format_map(names) for part in wanted.command], variables, f"conversion to {wanted.name}")
        os.replace(unfinished, path)
    finally:
        _remove(unfinished)
    return path


def as_gguf(model: Path, kind: str, peers_dir: Path) -> Path:
    """Returns a directory as a GGUF file with tensors of a type, converted if it is missing.

    Raises INVALID_ARGUMENT for a type that is not written or a model that is a file already, and
    FAILED_PRECONDITION if the conversion fails.
    """
    if kind not in WRITTEN:
        raise errors.invalid("gguf", f"must be one of {', '.join(WRITTEN)}", kind)
    if not model.is_dir():
        raise errors.invalid("gguf", "must be empty for a model that is a file", kind)
    try:
        return asyncio.run(converted(model, gguf(kind), peers_dir, "", os.environ))
    except PeerFailed as error:
        raise errors.failed_precondition("MODEL_INVALID", f"{model}: {error}") from error


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
