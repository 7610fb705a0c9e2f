"""The findings as JSON and as tables."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ryzanstein.lab.bench.router.load.call_end import by_reason
from ryzanstein.lab.bench.router.load.percentile import percentile
from ryzanstein.lab.bench.router.load.throughput import Throughput
from ryzanstein.lab.bench.router.survey import Findings, SurveyPlan
from ryzanstein.lab.bench.router.systems import DIRECT
from ryzanstein.process.allotment import whole_cores


def document(plan: SurveyPlan, findings: Findings) -> dict[str, Any]:
    """Returns the document in SI units.

    `added_ttft_*` is the difference to `direct` of the same percentile, of single answers one after
    another; null without `direct`.
    """
    return {
        "machine": {"cores": whole_cores(), "system": platform.platform(), "python": platform.python_version()},
        "plan": asdict(plan),
        "results": [_row(findings, system, streams) for system, streams in findings.long],
        "held": [{"system": name, **asdict(found)} for name, found in findings.held.items()],
        "many_streams": [{"system": name, **_counted(asdict(found))} for name, found in findings.many.items()],
        "slow_readers": [{"system": name, **_counted(asdict(found))} for name, found in findings.slow.items()],
        "absent": findings.absent,
    }


def _row(findings: Findings, system: str, streams: int) -> dict[str, Any]:
    long = Throughput.middle(findings.long[system, streams])
    short = Throughput.middle(findings.short[system, streams])
    return {
        "system": system,
        "streams": streams,
        **_counted(asdict(long)),
        "tokens_per_message": long.tokens_per_s / max(1.0, long.messages_per_s),
        "requests_per_s": short.requests_per_s,
        "request_errors": len(short.problems),
        **({"request_error_reasons": by_reason(short.problems)} if short.problems else {}),
        "added_ttft_p50_s": _added(findings, system, 0.5),
        "added_ttft_p99_s": _added(findings, system, 0.99),
    }


def _added(findings: Findings, system: str, share: float) -> float | None:
    if not findings.first_tokens_s.get(DIRECT) or not findings.first_tokens_s.get(system):
        return None
    times = findings.first_tokens_s
    return percentile(times[system], share) - percentile(times[DIRECT], share)


def _counted(found: dict[str, Any]) -> dict[str, Any]:
    """Replaces the problems with their number, their reasons and a few of them."""
    problems = found.pop("problems")
    why = {"error_reasons": by_reason(problems), "error_samples": problems[:3]} if problems else {}
    return {**found, "errors": len(problems), **why}


def tables(content: dict[str, Any]) -> list[Table]:
    """Returns tables for people."""
    return [_speed(content["results"]), _bounds(content)]


def _speed(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table(title="256-token answers; requests: answers of 4 tokens")
    for heading in (
        "system",
        "streams",
        "tokens/s",
        "tokens/message",
        "delay p50, p99 ms",
        "CPU us/token node, system, client",
    ):
        table.add_column(heading)
    for heading in ("requests/s", "added first token p50, p99 ms", "errors"):
        table.add_column(heading)
    for row in rows:
        cpu = (row["node_cpu_s_per_token"], row["system_cpu_s_per_token"], row["client_cpu_s_per_token"])
        table.add_row(
            row["system"],
            str(row["streams"]),
            f"{row['tokens_per_s']:,.0f}",
            f"{row['tokens_per_message']:.2f}",
            f"{row['delay_p50_s'] * 1e3:.1f}, {row['delay_p99_s'] * 1e3:.1f}",
            ", ".join(f"{seconds * 1e6:.1f}" for seconds in cpu),
            f"{row['requests_per_s']:,.0f}",
            f"{_ms(row['added_ttft_p50_s'])}, {_ms(row['added_ttft_p99_s'])}",
            str(row["errors"] + row["request_errors"]),
        )
    return table


def _bounds(content: dict[str, Any]) -> Table:
    table = Table(title="memory and many streams")
    for heading in ("system", "KiB/idle connection", "KiB/active stream", "streams at once", "their errors"):
        table.add_column(heading)
    for heading in ("slow readers' growth MiB", "their errors"):
        table.add_column(heading)
    many = {row["system"]: row for row in content["many_streams"]}
    slow = {row["system"]: row for row in content["slow_readers"]}
    held = {row["system"]: row for row in content["held"]}
    for name in dict.fromkeys((*held, *many, *slow)):
        table.add_row(
            name,
            _kib(held.get(name, {}).get("idle_connection_bytes")),
            _kib(held.get(name, {}).get("active_stream_bytes")),
            str(many.get(name, {}).get("at_once", "")),
            str(many.get(name, {}).get("errors", "")),
            _kib(slow.get(name, {}).get("peak_bytes"), 2**20),
            str(slow.get(name, {}).get("errors", "")),
        )
    return table


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:.2f}"


def _kib(num_bytes: float | None, unit: int = 2**10) -> str:
    return "" if num_bytes is None else f"{num_bytes / unit:,.1f}"


def publish(content: dict[str, Any], json_path: str) -> None:
    """Writes JSON to a file, or to standard output for "-". Without a path it prints tables."""
    text = json.dumps(content, indent=2)
    if json_path == "-":
        print(text)
    elif json_path:
        Path(json_path).write_text(text + "\n")
    else:
        for table in tables(content):
            Console(width=180).print(table)
