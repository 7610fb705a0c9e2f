"""The command `ryzanstein bench compare A B`: what became slower from one suite run to another.

Changes within the noise do not count. Exit codes: 0 nothing became slower, 1 something did, 2 the
documents cannot be compared.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from ryzanstein.errors import RyzansteinError
from ryzanstein.lab.bench.engine.compare.documents import DocumentComparison, FigureChange, Rule, compare_documents
from ryzanstein.lab.bench.engine.report import publish
from ryzanstein.lab.bench.engine.suite.command import show_seconds
from ryzanstein.lab.bench.engine.suite.document import SuiteDocument, read_document

SCHEMA = "ryzanstein.bench.compare/1"
_SLOWER, _NOT_COMPARABLE = 1, 2
_STYLES = {"slower": "bold red", "faster": "green", "same": "", "unclear": "dim"}


def as_document(before: SuiteDocument, after: SuiteDocument, rule: Rule, comparison: DocumentComparison) -> dict[str, Any]:
    """Returns the comparison for scripts.

    Factors are later over earlier ratio to the reference kernel: above 1 is slower.
    """
    return {
        "schema": SCHEMA,
        "before": {"host": before.machine.host, "commit": before.machine.commit},
        "after": {"host": after.machine.host, "commit": after.machine.commit},
        "rule": asdict(rule),
        "slower": [row.name for row in comparison.named("slower")],
        "faster": [row.name for row in comparison.named("faster")],
        "added": list(comparison.added),
        "notes": list(comparison.notes),
        "kernel_factors": dict(comparison.kernel_factors),
        "changes": [_as_row(row) for row in comparison.rows],
    }


def _as_row(row: FigureChange) -> Mapping[str, Any]:
    before_s, after_s = _seconds(row)
    return {"name": row.name, "verdict": row.verdict, **asdict(row.change), "before_s": before_s, "after_s": after_s}


def _seconds(row: FigureChange) -> tuple[float, float]:
    return statistics.median(row.before.seconds), statistics.median(row.after.seconds)


def table(comparison: DocumentComparison) -> Table:
    """Returns the table for people."""
    visible = Table(title="after over before, relative to the reference kernel", title_justify="left")
    for heading in ("figure", "before", "after", "factor", "within", "verdict"):
        visible.add_column(heading, justify="left" if heading in ("figure", "verdict") else "right")
    for row in comparison.rows:
        change = row.change
        bounds = f"{change.low:.3f} .. {change.high:.3f}"
        cells = (row.name, *map(show_seconds, _seconds(row)), f"{change.factor:.3f}", bounds, row.verdict)
        visible.add_row(*cells, style=_STYLES[row.verdict])
    return visible


def compare(
    before: Annotated[Path, typer.Argument(help="document of `bench suite`", dir_okay=False)],
    after: Annotated[Path, typer.Argument(help="a later document of the same machine", dir_okay=False)],
    *,
    min_effect: Annotated[float, typer.Option(min=0.0, max=10.0, help="smallest change that counts; 0.05 is 5 %")] = 0.05,
    false_alarms: Annotated[float, typer.Option(min=1e-6, max=0.5, help="chance of any alarm if nothing changed")] = 0.05,
    json_path: Annotated[str, typer.Option("--json", help="write JSON to this file; - is standard output")] = "",
) -> None:
    """Report what became slower from BEFORE to AFTER, beyond noise. Exit code 1: something did, 2: they are not comparable."""
    people = Console(stderr=True, highlight=False, soft_wrap=True, markup=False)
    try:
        earlier, later = read_document(before), read_document(after)
        rule = Rule(min_effect, false_alarms)
        comparison = compare_documents(earlier, later, rule)
    except RyzansteinError as error:
        people.print(f"cannot be compared: {error.message}")
        raise typer.Exit(_NOT_COMPARABLE) from error
    publish(as_document(earlier, later, rule, comparison), [table(comparison)], json_path)
    _tell(comparison, people)
    if comparison.named("slower"):
        raise typer.Exit(_SLOWER)


def _tell(comparison: DocumentComparison, people: Console) -> None:
    for note in (*comparison.notes, *(f"{name} is new" for name in comparison.added)):
        people.print(note)
    factors = ", ".join(f"{name} {factor:.2f}" for name, factor in comparison.kernel_factors.items())
    people.print(f"the machine itself, after over before: {factors}")
    counts = ((verdict, comparison.named(verdict)) for verdict in ("slower", "faster", "same", "unclear"))
    people.print(", ".join(f"{len(rows)} {verdict}" for verdict, rows in counts))
