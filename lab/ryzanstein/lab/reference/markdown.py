"""Tables in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

GENERATED = "This page is generated: `python -P -m ryzanstein.lab.reference` writes it, and a test compares it with the code."


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Returns the lines of a table and an empty one. A `|` within a cell is escaped."""
    lines = [header, ["---"] * len(header), *rows]
    return [*("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines), ""]
