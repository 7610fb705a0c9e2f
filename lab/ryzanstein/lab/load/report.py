"""The figures of a load: a document, and a table for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from rich.table import Table

from ryzanstein.lab.load.objectives import Objectives
from ryzanstein.lab.load.outcome import Outcome
from ryzanstein.lab.load.run import LoadRun

_SHARES = {"p50": 50, "p90": 90, "p95": 95, "p99": 99}
_MOST_EXAMPLES = 10


@dataclass(frozen=True, slots=True)
class Window:
    """What is measured, in seconds after the start: from the end of the warm-up until no request comes any more."""

    start_s: float
    end_s: float

    @property
    def width_s(self) -> float:
        return max(1e-9, self.end_s - self.start_s)


def window_of(run: LoadRun, warmup_s: float, seconds: float | None) -> Window:
    """Returns the window of a run; a warm-up as long as the run leaves all of it."""
    took_s = max(run.ended - run.started, 1e-9)
    end_s = took_s if seconds is None else min(seconds, took_s)
    return Window(warmup_s if warmup_s < end_s else 0.0, end_s)


def document(run: LoadRun, window: Window, objectives: Objectives) -> dict[str, Any]:
    """Returns all figures. Latencies are in seconds and of complete answers, whatever else happened is counted beside them.

    The verdict is on all requests, the rest on those that came in the window.
    """
    counted = [each for each in run.outcomes if window.start_s <= each.came - run.started < window.end_s]
    complete = [each for each in counted if each.complete]
    good = sum(objectives.met_by(each) for each in counted)
    tokens = sum(num for second, num in run.token_seconds.items() if window.start_s <= second < window.end_s)
    return {
        "requests": {
            "counted": len(counted),
            "complete": len(complete),
            "refused": sum(each.refused for each in counted),
            "failed": sum(not each.complete and not each.refused for each in counted),
            "resumed": sum(each.num_calls > 1 for each in complete),
            "moved": sum(len(each.nodes) > 1 for each in complete),
        },
        "rate": {
            "window_s": round(window.width_s, 3),
            "offered_per_s": _rate(len(counted), window),
            "complete_per_s": _rate(len(complete), window),
            "output_tokens_per_s": _rate(tokens, window),
        },
        "tokens": {
            "prompt_mean": _mean(each.num_prompt for each in complete),
            "output_mean": _mean(each.num_tokens for each in complete),
        },
        "latency_s": {
            "ttft": quantiles([each.ttft_s for each in complete if each.first]),
            "tpot": quantiles([each.tpot_s for each in complete if each.tpot_s is not None]),
            "longest_pause": quantiles([each.longest_pause_s for each in complete]),
            "e2e": quantiles([each.e2e_s for each in complete]),
        },
        "sent_late_s": quantiles([each.sent - each.came for each in counted]),
        "objective": {
            **{name: bound for name, bound in asdict(objectives).items() if bound is not None},
            "met": round(good / len(counted), 4) if counted else None,
            "goodput_per_s": _rate(good, window),
        },
        "sessions": _sessions(counted),
        "nodes": dict(Counter(each.nodes[-1] for each in complete if each.nodes).most_common()),
        "failures": dict(Counter(each.failure.split(":", 1)[0] for each in run.outcomes if each.failure).most_common()),
        "verdict": verdict(run.outcomes),
        "seconds": _seconds(run),
    }


def verdict(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Returns how many tokens were lost and repeated, and how many answers were not what they have to be."""
    changed = [each for each in outcomes if each.verdict.differences]
    examples = [f"{each.kind}, turn {each.turn}: {'; '.join(each.verdict.differences)}"[:300] for each in changed]
    return {
        "answers": len(outcomes),
        "lost_tokens": sum(each.verdict.lost for each in outcomes),
        "repeated_tokens": sum(each.verdict.repeated for each in outcomes),
        "changed_answers": len(changed),
        "failed_answers": sum(not each.complete and not each.refused for each in outcomes),
        "examples": [*examples, *(each.failure for each in outcomes if each.failure and not each.refused)][:_MOST_EXAMPLES],
    }


def flawless(found: dict[str, Any]) -> bool:
    """Returns whether a verdict has nothing to say."""
    return not any(found[name] for name in ("lost_tokens", "repeated_tokens", "changed_answers", "failed_answers"))


def quantiles(values: Sequence[float]) -> dict[str, float] | None:
    """Returns the quantiles and the largest; None without values."""
    if not values:
        return None
    found = {name: round(float(np.percentile(values, share)), 6) for name, share in _SHARES.items()}
    return {**found, "max": round(max(values), 6)}


def tables(figures: dict[str, Any]) -> list[Table]:
    """Returns the figures for people; times are in milliseconds."""
    latency = Table("latency, ms", *(Column for Column in (*_SHARES, "max")), title="complete answers")
    names = {"ttft": "first token", "tpot": "further token", "longest_pause": "longest pause", "e2e": "whole answer"}
    for name, title in names.items():
        values = figures["latency_s"][name]
        latency.add_row(title, *(f"{values[each] * 1e3:.1f}" for each in (*_SHARES, "max")) if values else ["-"] * 5)
    rate, requests, found = figures["rate"], figures["requests"], figures["verdict"]
    whole = Table("", "", show_header=False, title="load")
    whole.add_row("requests", ", ".join(f"{num} {name}" for name, num in requests.items()))
    whole.add_row("requests a second", f"{rate['offered_per_s']} came, {rate['complete_per_s']} complete")
    whole.add_row("output tokens a second", f"{rate['output_tokens_per_s']}")
    objective = figures["objective"]
    if bounds := [
        f"{name.removesuffix('_s')} {objective[name]} s" for name in ("ttft_s", "tpot_s", "e2e_s") if name in objective
    ]:
        whole.add_row(
            "goodput", f"{objective['goodput_per_s']} a second, {objective['met'] or 0:.1%} within {', '.join(bounds)}"
        )
    if sessions := figures["sessions"]:
        whole.add_row(
            "sessions", f"{sessions['same_node']} of {sessions['further_turns']} turns on the node of the turn before"
        )
    for reason, num in figures["failures"].items():
        whole.add_row("failure", f"{num} x {reason}")
    counts = ("lost_tokens", "repeated_tokens", "changed_answers", "failed_answers")
    whole.add_row("verdict", ", ".join(f"{found[name]} {name.replace('_', ' ')}" for name in counts))
    return [whole, latency]


def _sessions(outcomes: Iterable[Outcome]) -> dict[str, int] | None:
    known = [each.same_node for each in outcomes if each.same_node is not None]
    return {"further_turns": len(known), "same_node": sum(known)} if known else None


def _seconds(run: LoadRun) -> list[dict[str, Any]]:
    """Returns what happened in each second."""
    came = Counter(int(each.came - run.started) for each in run.outcomes)
    failed = Counter(int(each.ended - run.started) for each in run.outcomes if each.failure)
    slowest: dict[int, float] = {}
    for each in run.outcomes:
        if each.first:
            second = int(each.came - run.started)
            slowest[second] = max(slowest.get(second, 0.0), each.ttft_s)
    last = max([*came, *failed, *run.token_seconds], default=-1)
    return [
        {
            "came": came[second],
            "failed": failed[second],
            "tokens": run.token_seconds[second],
            "slowest_ttft_s": round(slowest.get(second, 0.0), 4),
        }
        for second in range(last + 1)
    ]


def _rate(number: int, window: Window) -> float:
    return round(number / window.width_s, 3)


def _mean(values: Iterable[int]) -> float | None:
    found = list(values)
    return round(sum(found) / len(found), 2) if found else None
