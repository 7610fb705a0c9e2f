"""The verdicts that an agent remembers, and what the answers of the grammar process say of a constraint."""

from __future__ import annotations

import signal
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from ryzanstein import errors
from ryzanstein.constraints import Constraint
from ryzanstein.errors import RyzansteinError
from ryzanstein.worker.constraints.refusal import Cause
from ryzanstein.worker.ranks.starting.process import exit_text
from ryzanstein.worker.text.grammars.frames import Answer, Ended, Refused, Sound
from ryzanstein.worker.text.grammars.judge import Verdict, refused

_MAX_VERDICTS = 1024
_MAX_VERDICT_CHARS = 8 * 2**20
_TIME, _MEMORY = (Cause.TIME, "takes too long to compile"), (Cause.MEMORY, "takes too much memory to compile")
# What a fork that ended without an answer says of its constraint: it used up its processor time, or its address space.
# Other ends say nothing of it. A machine that is busy or short of memory ends forks too.
_OWN_FAULT = {-signal.SIGPROF: _TIME, -signal.SIGXCPU: _TIME, -signal.SIGABRT: _MEMORY, -signal.SIGSEGV: _MEMORY}


class RememberedVerdicts:
    """The verdicts of one model by cache scope, the least recently used of which are forgotten."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[str, Constraint], Verdict | RyzansteinError] = OrderedDict()
        self._chars = 0

    def get(self, scope: str, constraint: Constraint) -> Verdict | RyzansteinError | None:
        if (verdict := self._kept.get((scope, constraint))) is not None:
            self._kept.move_to_end((scope, constraint))
        return verdict

    def add(self, scope: str, constraint: Constraint, verdict: Verdict | RyzansteinError) -> None:
        if (scope, constraint) not in self._kept:
            self._chars += len(constraint.text)
        self._kept[scope, constraint] = verdict
        while len(self._kept) > _MAX_VERDICTS or self._chars > _MAX_VERDICT_CHARS:
            self._chars -= len(self._kept.popitem(last=False)[0][1].text)


@dataclass(frozen=True, slots=True)
class GrammarObserver:
    """Is told of compiles (seconds), of refusals (cause), and whether a verdict was known."""

    compiled: Callable[[float], None]
    refused: Callable[[Cause], None]
    looked_up: Callable[[bool], None]

    def verdict(self, constraint: Constraint, answer: Answer) -> Verdict | RyzansteinError:
        """Returns what an answer says of the constraint. Raises UNAVAILABLE if it says nothing."""
        match answer:
            case Sound(_, compile_s, grammar_bytes):
                self.compiled(compile_s)
                return Verdict(grammar_bytes)
            case Refused(_, cause, message):
                return self._refused(constraint, Cause(cause), message)
            case Ended(_, code) if code in _OWN_FAULT:
                return self._refused(constraint, *_OWN_FAULT[code])
            case Ended(_, code) if code > 0:  # an error in the compiler's Python, so one at every node
                return self._refused(constraint, Cause.PROCESS, "it could not be compiled")
            case Ended(_, code):
                self.refused(Cause.PROCESS)
                raise errors.unavailable("NODE_NOT_READY", f"the node could not compile the constraint: {_others_fault(code)}")
        raise errors.unavailable("NODE_NOT_READY", "the grammar process gave an unexpected answer")

    def _refused(self, constraint: Constraint, cause: Cause, message: str) -> RyzansteinError:
        self.refused(cause)
        return refused(constraint, message, cause.value)


def _others_fault(code: int) -> str:
    """Returns why a fork ended that was within its own bounds."""
    if code == -signal.SIGALRM:
        return "the machine is too busy"
    return "the machine is short of memory" if code == -signal.SIGKILL else f"the compiler {exit_text(code)}"
