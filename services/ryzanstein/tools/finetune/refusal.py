"""Why data or options cannot be trained with: what the command prints, with exit code 1."""

from __future__ import annotations

from collections.abc import Sequence

from ryzanstein.worker.refusal import ModelRefused, bounded

LISTED = 10
"""Faults of a file that are listed; more are counted."""


class DataRefused(ModelRefused):
    """A file has lines that cannot be trained on. The message has the number of each, and what is wrong with it."""

    def __init__(self, message: str) -> None:
        Exception.__init__(self, "\n".join(map(bounded, message.splitlines())))


def refuse_lines(file: object, faults: Sequence[tuple[int, str]], unit: str = "line") -> None:
    """Raises DataRefused if there are faults: pairs of a line's number and what is wrong with it."""
    if not faults:
        return
    lines = [f"{file}: {unit} {number}: {what[:200]}" for number, what in faults[:LISTED]]
    if len(faults) > LISTED:
        lines.append(f"{file}: and {len(faults) - LISTED} more {unit}s that cannot be used")
    raise DataRefused("\n".join(lines))


class Diverged(ModelRefused):
    """The loss is no number any more."""
