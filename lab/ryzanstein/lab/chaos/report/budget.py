"""The failure budget: what all runs of a fault cost together, and what they may cost."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from ryzanstein.lab.chaos.fault import Fault
from ryzanstein.lab.chaos.trial.observation import Observation

MAX_FALSE_ALARM_SHARE = 0.01


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Quantiles over the runs in which it happened.

    They are by nearest rank: of up to 99 runs, p99 is the maximum.

    `count` 0: it never happened.
    """

    count: int
    p50: float | None
    p99: float | None

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Quantiles:
        ordered = sorted(value for value in values if value is not None)
        if not ordered:
            return cls(0, None, None)
        return cls(len(ordered), _nearest_rank(ordered, 0.50), _nearest_rank(ordered, 0.99))


@dataclass(frozen=True, slots=True)
class BudgetRow:
    """One fault of the table.

    `startup_s`: mean seconds by phase of a rank's restart. `misses`: missed targets, in words.
    """

    fault: Fault
    runs: int
    detected_s: Quantiles
    detected_by: Counter[str]
    rerouted_s: Quantiles
    first_token_s: Quantiles
    serving_s: Quantiles
    startup_s: dict[str, float]
    whole_s: Quantiles
    requests: int
    tokens: int
    lost: int
    repeated: int
    failed: int
    changed: int
    failures: tuple[str, ...]
    troubles: Counter[str]
    metrics: Counter[str]
    log_lines: Counter[str]
    beats: int
    alarms: int
    unwanted: Counter[str] = field(default_factory=Counter)
    formed: int = 0
    invalid: int = 0
    spared: int = 0
    spared_pause_s: Quantiles = Quantiles(0, None, None)
    usual_pause_s: Quantiles = Quantiles(0, None, None)
    misses: tuple[str, ...] = ()

    @property
    def kept(self) -> bool:
        return not self.misses


def summed(fault: Fault, runs: Sequence[Observation]) -> BudgetRow:
    """Returns the row of a fault, with its misses."""

    def quantiles(take: Callable[[Observation], float | None]) -> Quantiles:
        return Quantiles.of(map(take, runs))

    def merged(take: Callable[[Observation], Counter[str]]) -> Counter[str]:
        return sum(map(take, runs), Counter())

    return judged(
        BudgetRow(
            fault,
            len(runs),
            detected_s=quantiles(lambda run: run.detected_s),
            detected_by=Counter(run.detected_by for run in runs if run.detected_by),
            rerouted_s=quantiles(lambda run: run.rerouted_s),
            first_token_s=quantiles(lambda run: run.first_token_s),
            serving_s=quantiles(lambda run: run.serving_s),
            startup_s=_means([dict(run.startup_s) for run in runs if run.startup_s]),
            whole_s=quantiles(lambda run: run.whole_s),
            requests=sum(run.streams for run in runs),
            tokens=sum(run.tokens for run in runs),
            lost=sum(run.lost for run in runs),
            repeated=sum(run.repeated for run in runs),
            failed=sum(run.failed for run in runs),
            changed=sum(run.changed for run in runs),
            failures=tuple(dict.fromkeys(failure for run in runs for failure in run.failures)),
            troubles=merged(lambda run: run.troubles),
            metrics=merged(lambda run: run.metrics),
            log_lines=merged(lambda run: run.log_lines),
            beats=sum(run.beats for run in runs),
            alarms=sum(run.alarms for run in runs),
            unwanted=merged(lambda run: run.unwanted),
            formed=sum(run.formed for run in runs),
            invalid=sum(run.invalid for run in runs),
            spared=sum(run.spared for run in runs),
            spared_pause_s=quantiles(lambda run: run.spared_pause_s),
            usual_pause_s=quantiles(lambda run: run.usual_pause_s),
        )
    )


def judged(row: BudgetRow) -> BudgetRow:
    """Returns the row with its misses."""
    return replace(row, misses=tuple(_misses(row)))


def _misses(row: BudgetRow) -> Iterable[str]:
    fault, bounds = row.fault, row.fault.bounds
    for count, what in ((row.lost, "tokens lost"), (row.repeated, "tokens repeated"), (row.changed, "answers changed")):
        if count:
            yield f"{count} {what}"
    if fault.layout.forms:
        yield from _formless(row)
    if row.failed and fault.healthy_left:
        yield f"{row.failed} requests failed"
    for what, times in row.unwanted.items():
        yield f"{what} x{times}"
    yield from _late("detected", row.detected_s, bounds.detected_s, row.runs)
    yield from _late("re-routed", row.rerouted_s, bounds.rerouted_s, 0)
    yield from _late("pauses of other models", row.spared_pause_s, fault.spared_pause_s, row.runs)
    yield from _late("first new token", row.first_token_s, bounds.first_token_s, row.runs)
    yield from _late("rank restart to SERVING", row.serving_s, bounds.serving_s, row.runs)
    if row.whole_s.count < row.runs:
        yield f"not recovered in {row.runs - row.whole_s.count} of {row.runs} runs"
    if fault.counts_beats and row.alarms > MAX_FALSE_ALARM_SHARE * row.beats:
        yield f"{row.alarms} false alarms in {row.beats} beats"


def _formless(row: BudgetRow) -> Iterable[str]:
    if row.invalid:
        yield f"{row.invalid} answers invalid"
    if not row.formed:
        yield "no answer with a form finished"


def _late(what: str, seen: Quantiles, bound_s: float | None, expected: int) -> Iterable[str]:
    """Yields misses. `expected` is how often it has to happen at least, if a bound is given."""
    if bound_s is None:
        return
    if seen.count < expected:
        yield f"{what} in only {seen.count} of {expected} runs"
    if seen.p99 is not None and seen.p99 >= bound_s:
        yield f"{what} p99 {seen.p99:.3g} s, not < {bound_s:g} s"


def _nearest_rank(ordered: Sequence[float], share: float) -> float:
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def _means(many: Sequence[dict[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for each in many for name in each)
    return {name: sum(each.get(name, 0.0) for each in many) / len(many) for name in names}
