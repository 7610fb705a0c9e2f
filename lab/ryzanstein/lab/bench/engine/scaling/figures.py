"""The figures of the scaling benchmark: medians per layout, and ratios within a round."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table

from ryzanstein.lab.bench.engine.scaling.layouts import RankLayout
from ryzanstein.lab.bench.engine.scaling.rounds import Samples, ScalingLoad


@dataclass(frozen=True, slots=True)
class ScalingFigure:
    """Medians of the rounds.

    `step_s` is a decode step, or the whole prefill. `communication_shares` is by rank: its time in
    collectives, including waits for late peers, over the time from submission to the last token.
    """

    layout: str
    ranks: int
    load: str
    batch: int
    tokens_per_s: float
    step_s: float
    communication_shares: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class ScalingRatio:
    """Tokens/s of `layout` over those of `over` in the same round.

    The figures are the median, and the least and most of any round.
    """

    layout: str
    over: str
    load: str
    median: float
    least: float
    most: float


def figures(samples: Samples) -> list[ScalingFigure]:
    return [_figure(samples, layout, load) for layout, loads in samples.items() for load in loads]


def _figure(samples: Samples, layout: RankLayout, load: ScalingLoad) -> ScalingFigure:
    runs = samples[layout][load]
    tokens_per_s = statistics.median(run.tokens_per_s for run in runs)
    tokens_per_step = load.num_tokens / load.new_tokens
    shares = tuple(map(statistics.median, zip(*(run.shares for run in runs), strict=True)))
    return ScalingFigure(str(layout), layout.ranks, load.name, load.batch, tokens_per_s, tokens_per_step / tokens_per_s, shares)


def ratios(samples: Samples) -> list[ScalingRatio]:
    """Returns the ratios of every layout with several ranks to every layout with one."""
    alone = [layout for layout in samples if layout.ranks == 1]
    together = [layout for layout in samples if layout.ranks > 1]
    return [_ratio(samples, a, b, load) for a in together for b in alone for load in samples[a]]


def _ratio(samples: Samples, layout: RankLayout, over: RankLayout, load: ScalingLoad) -> ScalingRatio:
    pairs = zip(samples[layout][load], samples[over][load], strict=True)
    values = [run.tokens_per_s / other.tokens_per_s for run, other in pairs]
    return ScalingRatio(str(layout), str(over), load.name, statistics.median(values), min(values), max(values))


def figure_table(rows: Sequence[ScalingFigure]) -> Table:
    """Returns the table for people."""
    visible = Table(title="layouts (ranks x threads per rank)", title_justify="left")
    for heading in ("load", "layout", "tokens/s", "step", "communication by rank"):
        visible.add_column(heading, justify="right")
    for row in sorted(rows, key=lambda row: row.load):
        shares = ", ".join(f"{share:.1%}" for share in row.communication_shares)
        visible.add_row(row.load, row.layout, f"{row.tokens_per_s:.2f}", f"{row.step_s * 1e3:.1f} ms", shares)
    return visible


def ratio_table(rows: Sequence[ScalingRatio]) -> Table:
    """Returns the table for people."""
    visible = Table(title="ratios of tokens/s within each round", title_justify="left")
    for heading in ("load", "layout", "over", "median", "least", "most"):
        visible.add_column(heading, justify="right")
    for row in sorted(rows, key=lambda row: row.load):
        values = (f"{value:.2f}" for value in (row.median, row.least, row.most))
        visible.add_row(row.load, row.layout, row.over, *values)
    return visible
