"""Has the kernels compiled before ranks need them: once a machine, in a process that can be killed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import Callable

import structlog

from ryzanstein.worker.kernels.build import NotBuilt, found
from ryzanstein.worker.kernels.packaged import packaged_library
from ryzanstein.worker.ranks.messages import RankSpec

log = structlog.get_logger(__name__)

_COMMAND = (sys.executable, "-P", "-m", "ryzanstein.worker.kernels", "--json")


async def have_kernels(spec: RankSpec, compiling: Callable[[], None] = lambda: None) -> None:
    """Returns when the kernels are there, or cannot be: ranks then find out why, and report it.

    `compiling` is called when compiling begins. Waits while another process compiles them. Cancelled: nothing compiles on.
    """
    if spec.settings.kernels == "torch" or spec.device == "cuda" or spec.settings.dtype not in ("auto", "float32"):
        return
    if await asyncio.to_thread(_are_there):
        return
    try:
        await _compile(compiling)
    except OSError as error:
        log.warning("kernels cannot be compiled", reason=str(error))


def _are_there() -> bool:
    for source in (packaged_library, found):
        with contextlib.suppress(NotBuilt):
            source()
            return True
    return False


async def _compile(compiling: Callable[[], None]) -> None:
    """Runs the compilers. The end of its standard input ends the process, whatever ends us."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*_COMMAND, stdin=pipe, stdout=pipe, start_new_session=True)
    assert process.stdout is not None
    try:
        async for line in process.stdout:
            _report(line, compiling)
        await process.wait()
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


def _report(line: bytes, compiling: Callable[[], None]) -> None:
    match json.loads(line):
        case {"state": "compiling"}:
            compiling()
            log.info("compiling kernels", note="once on this machine")
        case {"library": library, "compiled_s": float(compiled_s)} if compiled_s > 0:
            log.info("kernels compiled", library=library, compiled_s=compiled_s)
        case {"reason": reason}:
            log.warning("kernels cannot be compiled", reason=reason)
