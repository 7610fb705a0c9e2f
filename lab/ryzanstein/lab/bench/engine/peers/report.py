"""A comparison as a JSON document and as tables."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from ryzanstein.lab.bench.engine.engine import Load, Workload
from ryzanstein.lab.bench.engine.peers.comparison import PeerOutcome
from ryzanstein.lab.bench.engine.peers.contenders import Label
from ryzanstein.lab.bench.engine.peers.footprint import Footprint
from ryzanstein.lab.bench.engine.peers.machine import PeerMachine
from ryzanstein.lab.bench.engine.peers.ratios import PeerRatio, Spread, first_tokens_equal, ratios
from ryzanstein.lab.bench.engine.peers.timing import Timing

_RATIOS: Mapping[str, Callable[[PeerRatio], Spread | None]] = {
    "tokens/s": lambda ratio: ratio.total_tokens_per_s,
    "decode tokens/s": lambda ratio: ratio.decode_tokens_per_s,
    "first tokens": lambda ratio: ratio.ttft,
    "processor time": lambda ratio: ratio.cpu,
    "memory": lambda ratio: ratio.peak_rss,
}


@dataclass(frozen=True, slots=True)
class PeerReport:
    """The report.

    `threads` is per contender, for all its ranks; `absent` says why a peer was not run. `footprints`
    are those that are known.
    """

    model: str
    machine: PeerMachine
    workload: Workload
    threads: int
    outcome: PeerOutcome
    absent: Mapping[Label, str]
    footprints: Mapping[Label, Footprint]

    def document(self) -> dict[str, Any]:
        """Returns the document in SI units. Rows have medians over the rounds, and every round."""
        equal = first_tokens_equal(self.outcome.timings)
        rows = self.outcome.timings.items()
        return {
            "model": self.model,
            "machine": asdict(self.machine),
            "threads": self.threads,
            "read_bytes_per_s": self.outcome.read_bytes_per_s,
            "footprints": {str(label): asdict(footprint) for label, footprint in self.footprints.items()},
            "facts": {str(label): dict(facts) for label, facts in self.outcome.facts.items() if facts},
            "results": [self._row(*key, rounds, equal.get(key)) for key, rounds in rows],
            "ratios": [_ratio_row(ratio) for ratio in ratios(self.outcome.timings)],
            "absent": _reasons(self.absent),
            "failed": _reasons(self.outcome.failed),
        }

    def _row(self, label: Label, load: Load, rounds: Mapping[int, Timing], equal: float | None) -> dict[str, Any]:
        medians = _medians(list(rounds.values()))
        return {
            **asdict(label),
            **asdict(load),
            **medians,
            "share_of_bandwidth": self._share(label, load, medians["decode_tokens_per_s"]),
            "first_tokens_equal": equal,
            "rounds": [{"round": number} | _figures(timing) for number, timing in sorted(rounds.items())],
        }

    def tables(self) -> list[Table]:
        """Returns the tables: speeds, footprints, ratios, and the contenders that did not run."""
        visible = [self._speeds(), *self._footprints(), *(self._ratios(what) for what in _RATIOS)]
        missing = {"absent": self.absent, "failed": self.outcome.failed}
        return visible + [_missing(title, labels) for title, labels in missing.items() if labels]

    def _speeds(self) -> Table:
        """Returns a table with a row for each contender and a column for each load."""
        workload = self.workload
        given = f"{workload.prompt_tokens} tokens in, {workload.new_tokens} out, {self.threads} threads"
        title = f"{given}: tokens/s, decode tokens/s, first tokens, memory"
        table = _table(title, ("engine",), workload.loads)
        for label in dict.fromkeys(label for label, _ in self.outcome.timings):
            rounds = [self.outcome.timings.get((label, load)) for load in workload.loads]
            table.add_row(str(label), *("-" if done is None else _speed(_medians(list(done.values()))) for done in rounds))
        return table

    def _ratios(self, what: str) -> Table:
        """Returns the table of ratios. Above 1 ours is better."""
        title = f"{what}, ours over the peer's: median (least to most) of the rounds"
        table = _table(title, ("ours", "peer"), self.workload.loads)
        cells = {(ratio.own, ratio.peer, ratio.load): ratio for ratio in ratios(self.outcome.timings)}
        for own, peer in dict.fromkeys((own, peer) for own, peer, _ in cells):
            found = [cells.get((own, peer, load)) for load in self.workload.loads]
            table.add_row(str(own), str(peer), *("-" if ratio is None else _spread(_RATIOS[what](ratio)) for ratio in found))
        return table

    def _footprints(self) -> list[Table]:
        """Returns a table of what the contenders read and hold, if something is known."""
        read = f"{max(self.outcome.read_bytes_per_s, default=0) / 1e9:.1f} GB/s"
        table = _table(f"of {read} that {self.threads} threads read", ("engine", "bytes of a step", "share", "peak, bound"), ())
        for label, known in self.footprints.items():
            rows = {load: _medians(list(done.values())) for (of, load), done in self.outcome.timings.items() if of == label}
            shares = [self._share(label, load, row["decode_tokens_per_s"]) for load, row in rows.items()]
            peak = max((row["peak_rss_bytes"] for row in rows.values()), default=0)
            table.add_row(
                str(label),
                "-" if known.step_bytes is None else f"{known.step_bytes / 1e6:.0f} MB",
                next((f"{share:.0%}" for share in shares if share is not None), "-"),
                "-" if known.memory_bound_bytes is None else f"{peak / 1e6:.0f}, {known.memory_bound_bytes / 1e6:.0f} MB",
            )
        return [table] if table.row_count else []

    def _share(self, label: Label, load: Load, decode_tokens_per_s: float) -> float | None:
        """Returns the share of the memory's bandwidth at which one sequence's steps read the weights."""
        known, read = self.footprints.get(label), self.outcome.read_bytes_per_s
        if load.batch != 1 or not load.decodes or known is None or known.step_bytes is None or not read:
            return None
        return decode_tokens_per_s * known.step_bytes / max(read)


def _figures(timing: Timing) -> dict[str, Any]:
    return {name: value for name, value in asdict(timing).items() if name != "first_tokens"}


def _medians(timings: Sequence[Timing]) -> dict[str, Any]:
    """Returns medians; the peak is the highest of any round."""
    return {
        "total_tokens_per_s": statistics.median(timing.total_tokens_per_s for timing in timings),
        "decode_tokens_per_s": statistics.median(timing.decode_tokens_per_s for timing in timings),
        "ttft_s": statistics.median(timing.ttft_s for timing in timings),
        "cpu_s": statistics.median(timing.cpu_s for timing in timings),
        "peak_rss_bytes": max(timing.peak_rss_bytes for timing in timings),
    }


def _ratio_row(ratio: PeerRatio) -> dict[str, Any]:
    row = asdict(ratio)
    return {**row.pop("own"), **row.pop("load"), **row}


def _reasons(labels: Mapping[Label, str]) -> list[dict[str, Any]]:
    return [{**asdict(label), "reason": reason} for label, reason in labels.items()]


def _missing(title: str, labels: Mapping[Label, str]) -> Table:
    table = _table(title, ("engine", "reason"), ())
    for label, reason in labels.items():
        table.add_row(str(label), reason)
    return table


def _table(title: str, names: Sequence[str], loads: Sequence[Load]) -> Table:
    table = Table(title=title, title_justify="left")
    for name in names:
        table.add_column(name)
    for load in loads:
        table.add_column(str(load), justify="right")
    return table


def _speed(figures: Mapping[str, Any]) -> str:
    ttft, memory = f"{figures['ttft_s'] * 1e3:.0f} ms", f"{figures['peak_rss_bytes'] / 2**20:.0f} MiB"
    speeds = f"{figures['total_tokens_per_s']:.0f}, {figures['decode_tokens_per_s']:.0f}"
    return f"{speeds}, {ttft}, {memory}"


def _spread(spread: Spread | None) -> str:
    return "-" if spread is None else f"{spread.median:.2f} ({spread.min:.2f} to {spread.max:.2f})"
