"""The report of a soak: what clients saw, and what grew in the processes that no fault ended."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import Any

from ryzanstein.lab.load.objectives import Objectives
from ryzanstein.lab.load.report import Window, document
from ryzanstein.lab.machine import machine
from ryzanstein.lab.soak.slopes import Slope, slope_of
from ryzanstein.lab.soak.soak import Soak, facts
from ryzanstein.lab.soak.strikes import STRIKES

MOST_PER_HOUR = 0.01
SETTLING_S = 600.0
_LEAST_HOURS = 1.0
_BY_LOAD = (" blocks held", " files", " threads")
_MOST_IN_SHORT = 0.05


def figures(seen: Soak, command: str) -> dict[str, Any]:
    """Returns everything that was measured.

    Growth counts after the settling time, or after the first quarter of a shorter soak.
    """
    whole = Window(0.0, seen.plan.seconds)
    settled_s = min(SETTLING_S, seen.plan.seconds / 4)
    grown: dict[str, dict[str, Any]] = {}
    for name, values in sorted(seen.samples.values.items()):
        kept = [(at_s, value) for at_s, value in zip(seen.samples.at_s, values, strict=True) if at_s >= settled_s]
        lowest = name.endswith(_BY_LOAD)
        if slope := slope_of([at_s for at_s, _ in kept], [value for _, value in kept], lowest=lowest):
            grown[name] = {**asdict(slope), "missed": missed(name, slope, (seen.plan.seconds - settled_s) / 3600)}
    load = document(seen.run, whole, Objectives())
    load.pop("seconds")
    return {"command": command, "machine": machine(), "soak": facts(seen), "load": load, "growth": grown}


def missed(name: str, slope: Slope, hours: float) -> bool:
    """Returns whether it grows by more than 1 % an hour.

    In less than an hour caches still fill and noise alone is more than that: there growth by 5 % has to be certain, and
    series are not judged, because each fault brings label values when it first strikes.
    """
    if hours >= _LEAST_HOURS:
        return slope.upper > MOST_PER_HOUR
    return slope.lower * hours > _MOST_IN_SHORT and not name.endswith(" series")


def misses(found: dict[str, Any]) -> list[str]:
    """Returns what is wrong, in sentences."""
    verdict = found["load"]["verdict"]
    wrong = [
        f"{verdict[name]} {name.replace('_', ' ')}"
        for name in ("lost_tokens", "repeated_tokens", "changed_answers", "failed_answers")
        if verdict[name]
    ]
    wrong += [f"{name} grows by up to {each['upper']:.1%} an hour" for name, each in found["growth"].items() if each["missed"]]
    return [*wrong, *([found["soak"]["broken"]] if found["soak"]["broken"] else [])]


def page(found: dict[str, Any]) -> str:
    """Returns the report in Markdown."""
    made, load, machine_ = found["soak"], found["load"], found["machine"]
    verdict, requests, latency = load["verdict"], load["requests"], load["latency_s"]
    what = {strike.name: strike.what for strike in STRIKES}
    struck = Counter(name for _, name in made["strikes"])
    wrong = misses(found)
    lines = [
        "# Soak",
        "",
        f"`{found['command']}` writes this page. Machine: {machine_['cpu']}, {machine_['cores']} cores, {machine_['date']}.",
        "",
        f"Two nodes and two routers serve the demo model for {made['seconds'] / 60:.0f} minutes. Requests of {made['users']} "
        f"users come at random times, {made['share']:.0%} as many as they can serve ({made['capacity_per_s']} a second). "
        f"Every {made['strike_every_s']:.0f} seconds a fault strikes `node-0`, `router-1` or the orchestrator. Each answer is "
        "compared with the first one to the same question.",
        "",
        f"**Missed**: {'; '.join(wrong)}." if wrong else "**Passed.**",
        "",
        "## What clients saw",
        "",
        "| | |",
        "|---|---:|",
        f"| answers | {verdict['answers']} |",
        f"| lost, repeated tokens | {verdict['lost_tokens']}, {verdict['repeated_tokens']} |",
        f"| changed, failed answers | {verdict['changed_answers']}, {verdict['failed_answers']} |",
        f"| answers that moved to another node | {requests['moved']} |",
        f"| answers that a client resumed | {requests['resumed']} |",
        f"| first token, p50, p99, slowest (s) | {_of(latency['ttft'])} |",
        f"| longest pause in an answer, p50, p99, longest (s) | {_of(latency['longest_pause'])} |",
        "",
        "## Faults",
        "",
        "| fault | times |",
        "|---|---:|",
        *(f"| {what[name]} | {num} |" for name, num in sorted(struck.items())),
        "",
        "## Growth",
        "",
        *(["Too short to judge 1 % an hour: only what surely grew by 5 % counts.", ""] if made["seconds"] < 4000 else []),
        "Of the processes that no fault ends, with their children. The interval holds 95 % of a bootstrap's slopes. What goes "
        "up and down with the load counts by the lowest value of each five minutes.",
        "",
        "| what | typical | growth an hour | interval |",
        "|---|---:|---:|---:|",
        *(
            f"| {name} | {_size(each['typical'])} | {each['per_hour']:+.2%} | {each['lower']:+.2%} to {each['upper']:+.2%} |"
            for name, each in found["growth"].items()
        ),
        "",
    ]
    return "\n".join(lines)


def _of(row: dict[str, float] | None) -> str:
    return ", ".join(f"{row[name]:.3f}" for name in ("p50", "p99", "max")) if row else "-"


def _size(value: float) -> str:
    return f"{value / 2**20:.1f} MiB" if value >= 2**20 else f"{value:.0f}"
