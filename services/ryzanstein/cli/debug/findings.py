"""What stands still in a node, and by whose fault: read from its ranks' boards and stacks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ryzanstein.cli.debug.evidence import seconds
from ryzanstein.v1 import debug_pb2 as pb

STILL_S = 1.0
_IDLE = "idle"
_STATES = {"R": "runs", "S": "sleeps", "D": "waits in the kernel", "T": "is stopped", "t": "is traced", "Z": "has ended"}


@dataclass(frozen=True, slots=True)
class Standstill:
    """Ranks of one model that do not move: `behind` holds up the others."""

    model: str
    behind: pb.ProcessStacks
    waiting: Sequence[pb.ProcessStacks]

    @property
    def text(self) -> str:
        text = f"{self.behind.name} of {self.model} holds up the others: {place(self.behind)}"
        if self.waiting:
            text += f"; {', '.join(each.name for each in self.waiting)} waits in {place(self.waiting[0])}"
        return text


def standstills(stacks: pb.DumpStacksResponse) -> list[Standstill]:
    """Returns the models of a node whose ranks are in a step and have not moved for a second."""
    models: dict[str, list[pb.ProcessStacks]] = {}
    for process in stacks.processes:
        if process.HasField("board"):
            models.setdefault(process.model, []).append(process)
    found = []
    for model, ranks in models.items():
        busy = any(rank.board.phase != _IDLE for rank in ranks)
        if busy and all(seconds(rank.board.since_progress) >= STILL_S for rank in ranks):
            behind = min(ranks, key=_progress)
            found.append(Standstill(model, behind, [rank for rank in ranks if rank is not behind]))
    return found


def _progress(rank: pb.ProcessStacks) -> tuple[int, int, bool, float]:
    """Orders ranks by how far they are; among equals, one that is stopped and the one that has been still longest is behind."""
    stopped = any(thread.state in "Tt" for thread in rank.threads)
    return rank.board.step, rank.board.collective, not stopped, -seconds(rank.board.since_progress)


def place(rank: pb.ProcessStacks) -> str:
    """Returns where a rank is: on the board, and in which function its first thread is."""
    board = rank.board
    text = f"step {board.step}, {board.phase}, collective {board.collective}, still for {seconds(board.since_progress):.1f} s"
    return f"{text}, {doing(rank.threads[0])}" if rank.threads else f"{text}, its process has ended"


def doing(thread: pb.ThreadStack) -> str:
    """Returns what a thread does, such as "sleeps in _wait (waiting.py, line 88)"."""
    verb = _STATES.get(thread.state, f"is in state {thread.state}")
    spun = f" ({seconds(thread.cpu) * 1e3:.0f} ms of CPU while watched)" if thread.cpu.ToNanoseconds() else ""
    if function := innermost(thread.stack):
        return f"{verb} in {function}{spun}"
    return f"{verb}{f' in {thread.waits_in}' if thread.waits_in else ''}{spun}"


def innermost(stack: str) -> str:
    """Returns the innermost function of a stack, such as "_wait (waiting.py, line 88)"; empty without a stack."""
    line = stack.partition("\n")[0]
    file, separator, rest = line.removeprefix('File "').partition('", line ')
    number, _, function = rest.partition(" in ")
    return f"{function} ({file.rpartition('/')[2]}, line {number})" if separator else ""
