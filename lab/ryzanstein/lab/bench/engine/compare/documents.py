"""Which figures of two documents of the suite can be compared, and how each changed."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ryzanstein import errors
from ryzanstein.lab.bench.engine.compare.rounds import Change, Verdict, compare_rounds, enough_rounds
from ryzanstein.lab.bench.engine.suite.document import SuiteDocument, SuiteFigure


@dataclass(frozen=True, slots=True)
class Rule:
    """When a change counts.

    `min_effect` 0.05: less than 5 % never does. `false_alarms` is the chance that any figure is
    outside its interval between two runs of the same code; every figure gets an equal share of it
    (Bonferroni).
    """

    min_effect: float
    false_alarms: float


@dataclass(frozen=True, slots=True)
class FigureChange:
    """One figure in both documents."""

    before: SuiteFigure
    after: SuiteFigure
    change: Change
    verdict: Verdict

    @property
    def name(self) -> str:
        return self.before.name


@dataclass(frozen=True, slots=True)
class DocumentComparison:
    """The comparison of two documents.

    `added` are figures that only the later document has, `notes` are differences that may be the
    reason, `kernel_factors` how much slower the machine was.
    """

    rows: tuple[FigureChange, ...]
    kernel_factors: Mapping[str, float]
    added: tuple[str, ...]
    notes: tuple[str, ...]

    def named(self, verdict: Verdict) -> list[FigureChange]:
        return [row for row in self.rows if row.verdict == verdict]


def compare_documents(before: SuiteDocument, after: SuiteDocument, rule: Rule) -> DocumentComparison:
    """Compares two documents.

    Raises INVALID_ARGUMENT with the field if the documents are of different machines or work, if
    the later one lacks a figure, or if the rounds are too few to show any change.
    """
    _same("machine.cpu", before.machine.cpu, after.machine.cpu)
    _same("machine.cores", before.machine.cores, after.machine.cores)
    for kernel in sorted({figure.reference for figure in before.figures}):
        _same(f"kernels[{kernel}]", _definition(before, kernel), _definition(after, kernel))
    later = {figure.name: figure for figure in after.figures}
    error = rule.false_alarms / len(before.figures)
    rows = tuple(_row(figure, _partner(figure, later), error, rule.min_effect) for figure in before.figures)
    known = {figure.name for figure in before.figures}
    return DocumentComparison(
        rows, _kernel_factors(before, after), tuple(name for name in later if name not in known), _notes(before, after)
    )


def _kernel_factors(before: SuiteDocument, after: SuiteDocument) -> dict[str, float]:
    """Returns how much slower the machine itself was, as ratios of medians.

    It covers each reference kernel that is the same in both documents.
    """
    return {
        kernel: statistics.median(after.kernels[kernel].rounds_s) / statistics.median(times.rounds_s)
        for kernel, times in before.kernels.items()
        if times.definition == _definition(after, kernel)
    }


def _definition(document: SuiteDocument, kernel: str) -> str | None:
    return document.kernels[kernel].definition if kernel in document.kernels else None


def _partner(figure: SuiteFigure, later: dict[str, SuiteFigure]) -> SuiteFigure:
    if figure.name not in later:
        raise errors.invalid(f"figures[{figure.name}]", "is missing in the later document")
    partner = later[figure.name]
    _same(f"figures[{figure.name}].workload", figure.workload, partner.workload)
    _same(f"figures[{figure.name}].reference", figure.reference, partner.reference)
    return partner


def _row(figure: SuiteFigure, later: SuiteFigure, error: float, min_effect: float) -> FigureChange:
    try:
        change = compare_rounds(figure.ratios, later.ratios, error)
    except ValueError as reason:
        field, wanted = (
            f"figures[{figure.name}].rounds",
            f"must be at least {enough_rounds(error)} in both to tell a change from noise",
        )
        raise errors.invalid(field, wanted, f"{len(figure.rounds)} and {len(later.rounds)}") from reason
    return FigureChange(figure, later, change, change.verdict(min_effect))


def _same(field: str, before: object, after: object) -> None:
    if before != after:
        raise errors.invalid(field, f"must be the same in both documents: {before!r} before", after)


def _notes(before: SuiteDocument, after: SuiteDocument) -> tuple[str, ...]:
    pairs: Sequence[tuple[str, object, object]] = [
        (name, getattr(before.machine, name), getattr(after.machine, name))
        for name in ("host", "flags", "memory_bytes", "system", "python", "torch")
    ]
    return tuple(f"machine.{name} differs: {old}, now {new}" for name, old, new in pairs if old != new)
