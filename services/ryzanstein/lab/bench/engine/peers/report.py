"""A comparison as a JSON document and as tables."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from rich.table import Table

from ryzanstein.lab.bench.engine.engine import Workload
from ryzanstein.lab.bench.engine.peers.comparison import PeerOutcome
from ryzanstein.lab.bench.engine.peers.contenders import Label
from ryzanstein.lab.bench.engine.peers.machine import PeerMachine
from ryzanstein.lab.bench.engine.peers.ratios import PeerRatio, first_tokens_equal, ratios
from ryzanstein.lab.bench.engine.peers.timing import Timing


@dataclass(frozen=True, slots=True)
class PeerReport:
    """The report.

    `threads` is per contender, for all its ranks; `absent` says why a peer was not run.
    """

    model: str
    machine: PeerMachine
    workload: Workload
    threads: int
    outcome: PeerOutcome
    absent: Mapping[Label, str]

    def document(self) -> dict[str, Any]:
        """Returns the document in SI units. Rows have medians over the rounds, and every round."""
        equal = first_tokens_equal(self.outcome.timings)
        rows = self.outcome.timings.items()
        return {
            "model": self.model,
            "machine": asdict(self.machine),
            "threads": self.threads,
            "facts": {str(label): dict(facts) for label, facts in self.outcome.facts.items() if facts},
            "results": [self._row(*key, rounds, equal.get(key)) for key, rounds in rows],
            "ratios": [_ratio_row(ratio) for ratio in ratios(self.outcome.timings)],
            "absent": _reasons(self.absent),
            "failed": _reasons(self.outcome.failed),
        }

    def _row(self, label: Label, batch: int, rounds: Mapping[int, Timing], equal: float | None) -> dict[str, Any]:
        return {
            **asdict(label),
            "batch": batch,
            "prompt_tokens": self.workload.prompt_tokens,
            "new_tokens": self.workload.new_tokens,
            **_medians(list(rounds.values())),
            "first_tokens_equal": equal,
            "rounds": [{"round": number} | _figures(timing) for number, timing in sorted(rounds.items())],
        }

    def tables(self) -> list[Table]:
        """Returns the tables: speeds, ratios, and the contenders that did not run."""
        shown = [self._speeds(), self._ratios("tokens/s"), self._ratios("first tokens")]
        missing = {"absent": self.absent, "failed": self.outcome.failed}
        return shown + [_missing(title, labels) for title, labels in missing.items() if labels]

    def _speeds(self) -> Table:
        """Returns a table with a row for each contender and a column for each batch size."""
        workload = self.workload
        given = f"{workload.prompt_tokens} tokens in, {workload.new_tokens} out, {self.threads} threads"
        title = f"{given}: tokens/s, first tokens, memory"
        table = _table(title, ("engine",), workload.batches)
        for label in dict.fromkeys(label for label, _ in self.outcome.timings):
            rounds = [self.outcome.timings.get((label, batch)) for batch in workload.batches]
            table.add_row(str(label), *("-" if done is None else _speed(_medians(list(done.values()))) for done in rounds))
        return table

    def _ratios(self, what: Literal["tokens/s", "first tokens"]) -> Table:
        """Returns the table of ratios. Above 1 ours is faster."""
        title = f"{what}, ours over the peer's: median (least to most) of the rounds"
        table = _table(title, ("ours", "peer"), self.workload.batches)
        cells = {(ratio.own, ratio.peer, ratio.batch): ratio for ratio in ratios(self.outcome.timings)}
        for own, peer in dict.fromkeys((own, peer) for own, peer, _ in cells):
            found = [cells.get((own, peer, batch)) for batch in self.workload.batches]
            table.add_row(str(own), str(peer), *("-" if ratio is None else _spread(ratio, what) for ratio in found))
        return table


def _figures(timing: Timing) -> dict[str, Any]:
    return {name: value for name, value in asdict(timing).items() if name != "first_tokens"}


def _medians(timings: Sequence[Timing]) -> dict[str, Any]:
    """Returns medians; the peak is the highest of any round."""
    return {
        "total_tokens_per_s": statistics.median(timing.total_tokens_per_s for timing in timings),
        "decode_tokens_per_s": statistics.median(timing.decode_tokens_per_s for timing in timings),
        "ttft_s": statistics.median(timing.ttft_s for timing in timings),
        "peak_rss_bytes": max(timing.peak_rss_bytes for timing in timings),
    }


def _ratio_row(ratio: PeerRatio) -> dict[str, Any]:
    row = asdict(ratio)
    return {**row.pop("own"), **row}


def _reasons(labels: Mapping[Label, str]) -> list[dict[str, Any]]:
    return [{**asdict(label), "reason": reason} for label, reason in labels.items()]


def _missing(title: str, labels: Mapping[Label, str]) -> Table:
    table = _table(title, ("engine", "reason"), ())
    for label, reason in labels.items():
        table.add_row(str(label), reason)
    return table


def _table(title: str, names: Sequence[str], batches: Sequence[int]) -> Table:
    table = Table(title=title, title_justify="left")
    for name in names:
        table.add_column(name)
    for batch in batches:
        table.add_column(f"batch {batch}", justify="right")
    return table


def _speed(figures: Mapping[str, Any]) -> str:
    ttft, memory = f"{figures['ttft_s'] * 1e3:.0f} ms", f"{figures['peak_rss_bytes'] / 2**20:.0f} MiB"
    return f"{figures['total_tokens_per_s']:.0f}, {ttft}, {memory}"


def _spread(ratio: PeerRatio, what: str) -> str:
    spread = ratio.total_tokens_per_s if what == "tokens/s" else ratio.ttft
    return f"{spread.median:.2f} ({spread.min:.2f} to {spread.max:.2f})"
