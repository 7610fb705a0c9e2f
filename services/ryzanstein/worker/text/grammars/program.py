"""`python -P -m ryzanstein.worker.text.grammars.program`: judges constraints for its agent.

A client's schema or grammar is compiled in a fork of this process, which already has the model's
tokens. The fork has limits of time and memory of its own; the kernel ends it when it exceeds them,
wherever it is. This process only reads models and reports. It ends with the agent.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Never

import msgspec

from ryzanstein.process.spare_memory import trim
from ryzanstein.worker.constraints.compiling import compiled
from ryzanstein.worker.constraints.refusal import Cause, ConstraintRefused
from ryzanstein.worker.constraints.table import TokenTable
from ryzanstein.worker.ranks.starting.fork_server import exit_code
from ryzanstein.worker.ranks.starting.lifeline import die_with
from ryzanstein.worker.text.grammars.frames import (
    MAX_PACKET_BYTES,
    Answer,
    Close,
    Ended,
    Judge,
    JudgeReady,
    Open,
    Opened,
    Refused,
    Request,
    Sound,
    Unreadable,
    packed,
)
from ryzanstein.worker.text.grammars.tokens import token_table
from ryzanstein.worker.text.programs.inside import PAGE_BYTES, begin, bound_memory, pages
from ryzanstein.worker.text.tokenizer import TextModel

if TYPE_CHECKING:
    from ryzanstein.worker.constraints.guidance import LLTokenizer

_PATIENCE = 10
"""Seconds of waiting per second of computing, because cores are shared."""


class GrammarProgram:
    """Reads requests, forks for each constraint, and reports forks that ended without an answer."""

    def __init__(self, agent: socket.socket, cpu_s: float, memory_bytes: int) -> None:
        self._agent, self._cpu_s, self._memory_bytes = agent, cpu_s, memory_bytes
        self._models: dict[str, tuple[TokenTable, LLTokenizer]] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(agent, selectors.EVENT_READ)
        self._request = msgspec.msgpack.Decoder(Request)

    def run(self) -> None:
        """Runs until the agent closes its end."""
        self._say(JudgeReady())
        while True:
            for key, _ in self._selector.select():
                if key.data is not None:
                    self._reap(key.fd, *key.data)
                elif (packet := self._agent.recv(MAX_PACKET_BYTES)) == b"":
                    return
                else:
                    self._take(self._request.decode(packet))

    def _take(self, request: Request) -> None:
        match request:
            case Open():
                self._open(request)
            case Judge():
                self._fork(request)
            case Close(key):
                self._models.pop(key, None)

    def _open(self, asked: Open) -> None:
        try:
            template_file = Path(asked.template_file) if asked.template_file else None
            table = token_table(TextModel.load(asked.path, asked.name, template_file=template_file))
            self._models[asked.key] = table, table.tokenizer()
            trim()  # reading a vocabulary leaves more free memory than it keeps
        except Exception as error:  # whatever is wrong with the files; llguidance raises plain ones
            self._say(Unreadable(asked.job, f"{type(error).__name__}: {error}"[:512]))
            return
        fd = os.memfd_create("tokens")
        try:
            with os.fdopen(os.dup(fd), "wb") as file:
                file.write(table.encode())
            socket.send_fds(self._agent, [packed(Opened(asked.job))], [fd])
        finally:
            os.close(fd)

    def _fork(self, judge: Judge) -> None:
        if judge.key not in self._models:
            self._say(Unreadable(judge.job, "the model is not open"))
            return
        pid = os.fork()
        if pid == 0:
            self._judge(judge)
        self._selector.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, judge.job))

    def _reap(self, pidfd: int, pid: int, job: int) -> None:
        self._selector.unregister(pidfd)
        os.close(pidfd)
        result = os.waitid(os.P_PID, pid, os.WEXITED)
        code = 1 if result is None else exit_code(result)
        if code != 0:
            self._say(Ended(job, code))

    def _judge(self, judge: Judge) -> Never:
        """Compiles in the fork, and ends it. What it exceeds, ends it before."""
        code = 1
        try:
            self._limit()
            self._say(_verdict(judge, *self._models[judge.key]))
            code = 0
        finally:
            os._exit(code)

    def _limit(self) -> None:
        die_with(os.getppid())
        bound_memory(self._memory_bytes)
        os.nice(5)
        # No handler: compiled code is ended too.
        signal.setitimer(signal.ITIMER_PROF, self._cpu_s)
        signal.setitimer(signal.ITIMER_REAL, _PATIENCE * self._cpu_s)

    def _say(self, answer: Answer) -> None:
        self._agent.send(packed(answer))


def _verdict(judge: Judge, table: TokenTable, tokenizer: LLTokenizer) -> Answer:
    began, before = time.process_time(), _own_pages()
    try:
        matcher = compiled(judge.constraint, table, tokenizer)
    except ConstraintRefused as refused:
        return Refused(judge.job, refused.cause.value, str(refused)[:1024])
    except RecursionError:
        return Refused(judge.job, Cause.SIZE.value, "is nested too deeply")
    except MemoryError:
        return Refused(judge.job, Cause.MEMORY.value, "takes too much memory")
    grown = max(0, _own_pages() - before) * PAGE_BYTES
    del matcher
    return Sound(judge.job, time.process_time() - began, grown + len(judge.constraint.text))


def _own_pages() -> int:
    _, resident, shared = pages()
    return resident - shared


def main() -> int:
    """Runs the process; returns its exit code."""
    arguments = begin("grammars", "Judges constraints on answers")
    with socket.socket(fileno=arguments.fd) as agent, suppress(BrokenPipeError, ConnectionResetError):
        GrammarProgram(agent, arguments.cpu_s, arguments.memory_bytes).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
