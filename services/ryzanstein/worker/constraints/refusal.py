"""The refusal of a constraint: where in it, why, and the bound or keyword that is at fault."""

from __future__ import annotations

from enum import StrEnum


class Cause(StrEnum):
    """Why a constraint is refused; the label of the metric."""

    KEYWORD = "keyword"
    SCHEMA = "schema"
    GRAMMAR = "grammar"
    UNSATISFIABLE = "unsatisfiable"
    SIZE = "size"
    TIME = "time"
    MEMORY = "memory"
    PROCESS = "process"


class ConstraintRefused(Exception):
    """A constraint that cannot be enforced. `where` is a JSON pointer in a schema, or empty."""

    def __init__(self, cause: Cause, reason: str, where: str = "") -> None:
        super().__init__(f"at {where}: {reason}" if where else reason)
        self.cause, self.reason, self.where = cause, reason, where
