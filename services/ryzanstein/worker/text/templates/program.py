"""`python -P -m ryzanstein.worker.text.templates.program`: renders chat templates for its agent.

A template is an untrusted program. Here it has its own limits of time, memory and text, not the
agent's. What exceeds them at worst ends this process, and the agent starts another. The process
ends with the agent.
"""

from __future__ import annotations

import math
import resource
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from io import BufferedRWPair
from types import FrameType
from typing import Any

import msgspec

from ryzanstein.worker.text.programs.inside import begin, bound_memory
from ryzanstein.worker.text.templates.frames import LENGTH, Answer, TemplateJob, TemplateReady, framed
from ryzanstein.worker.text.templates.renderer import Renderer
from ryzanstein.worker.text.templates.rendering import Limited, RenderLimit, TemplateSource

_DEAF_S = 1
_FAILED = 70


class _TimeIsUp(BaseException):
    """Raised when time is up. No `except Exception` of a template catches it."""


class TemplateProgram:
    """A loop that answers one job after the other."""

    def __init__(self, stream: BufferedRWPair[Any, Any], cpu_s: float) -> None:
        self._stream, self._cpu_s = stream, cpu_s
        self._renderer = Renderer()
        self._template: TemplateSource | None = None
        signal.signal(signal.SIGPROF, _time_is_up)

    def run(self) -> None:
        """Runs until the agent closes its end."""
        self._say(TemplateReady())
        while header := self._stream.read(LENGTH.size):
            job = msgspec.msgpack.decode(self._stream.read(*LENGTH.unpack(header)), type=TemplateJob)
            self._say(self._within_time(partial(self._answer, job)))

    def _answer(self, job: TemplateJob) -> Answer:
        self._template = job.template or self._template
        if self._template is None:
            raise ValueError("the first job must have a template")
        if job.prompt is None:
            return self._renderer.check(self._template) or TemplateReady()
        return self._renderer.render(self._template, job.prompt)

    def _within_time(self, answer: Callable[[], Answer]) -> Answer:
        """Runs a job within its time.

        A timer interrupts Python. Where it cannot, in one long operation, the kernel ends the
        process soon after.
        """
        used = resource.getrusage(resource.RUSAGE_SELF)
        soon = math.ceil(used.ru_utime + used.ru_stime + self._cpu_s) + _DEAF_S
        resource.setrlimit(resource.RLIMIT_CPU, (soon, resource.RLIM_INFINITY))
        try:
            signal.setitimer(signal.ITIMER_PROF, self._cpu_s)
            try:
                return answer()
            finally:
                signal.setitimer(signal.ITIMER_PROF, 0)
        except _TimeIsUp:
            return Limited(RenderLimit.TIME)

    def _say(self, answer: Answer) -> None:
        self._stream.write(framed(answer))
        self._stream.flush()


def _time_is_up(number: int, frame: FrameType | None) -> None:
    raise _TimeIsUp


def main() -> int:
    """Runs the process; returns its exit code."""
    arguments = begin("templates", "Renders chat templates")
    bound_memory(arguments.memory_bytes)
    with socket.socket(fileno=arguments.fd) as agent, agent.makefile("rwb") as stream, suppress(BrokenPipeError):
        try:
            TemplateProgram(stream, arguments.cpu_s).run()
        except Exception:  # no memory to read a job, or a bug: the agent logs the code, and no stack gets into its log
            return _FAILED
    return 0


if __name__ == "__main__":
    sys.exit(main())
