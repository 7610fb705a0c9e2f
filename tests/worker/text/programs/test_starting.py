"""A program of the agent, started and killed, real."""

from __future__ import annotations

import asyncio
import os
import signal
import socket

import psutil
import pytest

from ryzanstein.errors import Code, RyzansteinError
from ryzanstein.worker.text.programs.starting import AgentProgram, ProgramBounds

BOUNDS = ProgramBounds(1.0, 128 * 2**20, 2)


def program(module: str) -> AgentProgram:
    return AgentProgram("test process", module, socket.SOCK_STREAM)


async def test_a_program_speaks_first_and_ends_when_it_is_killed() -> None:
    templates = program("ryzanstein.worker.text.templates.program")
    running = templates.start(BOUNDS)
    with running.ours:
        async with asyncio.timeout(30):
            assert await asyncio.get_running_loop().sock_recv(running.ours, 1)
        child = psutil.Process(running.process.pid)
        assert child.name() == "templates"
        assert os.getsid(child.pid) == child.pid
        assert await running.killed() == -signal.SIGKILL
        assert not child.is_running()
        assert await running.killed() == -signal.SIGKILL, "a second time changes nothing"
    assert str(templates.ended(-signal.SIGKILL, " during startup")) == "test process died of SIGKILL during startup"


async def test_a_program_that_cannot_start_says_so_by_its_end() -> None:
    running = program("ryzanstein.no_such_module").start(BOUNDS)
    with running.ours:
        async with asyncio.timeout(30):
            assert await running.process.exited == 1
            assert await asyncio.get_running_loop().sock_recv(running.ours, 1) == b""


def test_as_many_wait_as_may() -> None:
    BOUNDS.admit(1)
    with pytest.raises(RyzansteinError) as refused:
        BOUNDS.admit(2)
    assert (refused.value.code, refused.value.reason) == (Code.RESOURCE_EXHAUSTED, "QUEUE_FULL")
