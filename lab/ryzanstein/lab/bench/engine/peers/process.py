"""A running peer: a process of a separate environment that answers batches, and its memory.

It is started for its turn and ended after it with all processes that it started, so that nothing
computes during the next turn.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from ryzanstein.lab.bench.engine.memory import cpu_s, peak_rss_bytes, reset_peak_rss, tree
from ryzanstein.lab.bench.engine.peers.timing import Timing

_TAIL_BYTES = 8192
_ANSWER_BYTES = 2**20
_END_S = 10.0
_ERROR = re.compile(r"\b[A-Z]\w*Error: .{1,200}")


class PeerFailed(Exception):
    """The peer ended, reported a failure, or timed out.

    The message is the peer's last output if it had one.
    """


class PeerProcess:
    """A peer's process.

    As an async context manager it starts the command, waits until the model is loaded, and ends it.
    `timeout_s` bounds loading and each batch.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], timeout_s: float) -> None:
        self._command = command
        self._environment = environment
        self._timeout_s = timeout_s
        self._tail = b""
        self.facts: Mapping[str, str] = {}

    async def __aenter__(self) -> Self:
        self._process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=self._environment,
            limit=_ANSWER_BYTES,
            start_new_session=True,
        )
        self._reading = asyncio.create_task(self._read_errors())
        self._began = _start_of(self._process.pid)
        try:
            self.facts = (await self._answer())["facts"]
        except BaseException:
            await self._end(grace_s=0.0)
            raise
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        await self._end(_END_S if kind is None else 0.0)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def generate(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> Timing:
        """Runs one batch. Raises PeerFailed if there is no answer in time."""
        processes = tree(self._process.pid)
        for pid in processes:
            reset_peak_rss(pid)
        began_cpu_s = cpu_s(processes)
        assert self._process.stdin is not None
        request = json.dumps({"prompts": prompts, "new_tokens": new_tokens})
        self._process.stdin.write(request.encode() + b"\n")
        answer = await self._answer()
        return Timing.of(answer, sum(map(peak_rss_bytes, processes)), cpu_s(processes) - began_cpu_s)

    async def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(self._timeout_s):
                line = await self._process.stdout.readline()
        except TimeoutError:
            raise PeerFailed(f"no answer within {self._timeout_s:.0f} s") from None
        if not line:
            raise PeerFailed(await self._last_words())
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise PeerFailed(self._with_cause(answer["error"]))
        return answer

    def _with_cause(self, error: str) -> str:
        """Adds the error that a child process of the peer wrote, if one failed."""
        errors = _ERROR.findall(self._tail.decode(errors="replace"))
        cause = next((found for found in reversed(errors) if not error.startswith(found)), "")
        return f"{error} ({cause})" if cause else error

    async def _last_words(self) -> str:
        """Returns how a process that closed its output ended, and what it wrote last."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_END_S):
                await asyncio.gather(self._process.wait(), self._reading)
        lines = self._tail.decode(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "no output")
        return f"ended with {self._process.returncode}: {last}"

    async def _read_errors(self) -> None:
        assert self._process.stderr is not None
        while piece := await self._process.stderr.read(_TAIL_BYTES):
            self._tail = (self._tail + piece)[-_TAIL_BYTES:]

    async def _end(self, grace_s: float) -> None:
        """Ends the process and kills what is left of its session.

        Closing its input requests the end, and the end of its output confirms it. The kill follows
        then, or after the grace.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(grace_s):
                    await self._process.stdout.read()
        finally:
            self._kill_session()
            await self._process.wait()
            await self._reading

    def _kill_session(self) -> None:
        """Kills the process and what it left. asyncio may have reaped it: its id is another's if that began at another time."""
        if _start_of(self._process.pid) in ("", self._began):
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)


def _start_of(pid: int) -> str:
    """Returns when a process began, in clock ticks since the boot (proc_pid_stat(5)); empty if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def runner_command(python: Path, runner: str, settings: Mapping[str, Any]) -> tuple[str, ...]:
    return (str(python), "-P", "-m", f"runners.{runner}", json.dumps(settings))
