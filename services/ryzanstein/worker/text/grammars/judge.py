"""What an agent asks before it hands a constrained group to the ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from ryzanstein import errors
from ryzanstein.constraints import Constraint
from ryzanstein.errors import Code, RyzansteinError
from ryzanstein.worker.text.tokenizer import TextModel


@dataclass(frozen=True, slots=True)
class Verdict:
    """A constraint that can be enforced, and the memory that its grammar takes."""

    grammar_bytes: int


class ConstraintJudge(Protocol):
    """Judges constraints for an agent."""

    @property
    def able(self) -> bool:
        """Whether constraints can be enforced here at all."""
        ...

    async def judge(self, constraint: Constraint, model: TextModel, scope: str = "") -> Verdict:
        """Returns the verdict, remembered for the requests of this cache scope.

        Raises INVALID_ARGUMENT that names the field, where in it and why. RESOURCE_EXHAUSTED: too many
        wait. UNAVAILABLE: the node cannot judge at the moment.
        """
        ...

    async def tokens(self, model: TextModel) -> bytes:
        """Returns the model's packed table of tokens. Raises UNAVAILABLE."""
        ...


def refused(constraint: Constraint, message: str, cause: str) -> RyzansteinError:
    """Returns the client's error. Every node would say the same."""
    error = errors.invalid(constraint.field, message)
    return RyzansteinError(
        error.message, Code.INVALID_ARGUMENT, "INVALID_CONSTRAINT", {**error.metadata, "cause": cause}, error.violations
    )


class NoJudge:
    """The judge of a node without llguidance."""

    able = False

    async def judge(self, constraint: Constraint, model: TextModel, scope: str = "") -> Verdict:
        raise errors.constraints_unsupported(model.name)

    async def tokens(self, model: TextModel) -> bytes:
        raise errors.constraints_unsupported(model.name)
