"""What a run of `ryzanstein bench control` found, as JSON and as a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table

from ryzanstein.lab.bench.control.plan import ControlPlan
from ryzanstein.lab.machine import machine

_NOTES = (
    "Processes named nodes-* and watchers are stand-ins: their cost is no node's.",
    "Real routers have links; further routers only watch, and there is always one that does.",
    "Messages and bytes are gRPC's, counted by the stand-ins, without framing; a real router's are the mean of them.",
    "loop_lag_p99_s is the bound of a histogram's bucket.",
    "Stand-ins report 20 times a second; report_late_max_s is by how much the latest report was late.",
)


def document(plan: ControlPlan, rows: Sequence[dict[str, Any]], failed: Sequence[str]) -> dict[str, Any]:
    """Returns the document, in SI units."""
    return {"machine": machine(), "plan": asdict(plan), "notes": list(_NOTES), "rows": list(rows), "failed": list(failed)}


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """Returns a table for people: the orchestrator and a router in each phase."""
    found = Table(title="the control plane; cores are those that a process used on average")
    for heading in ("nodes", "models", "routers (real)", "phase", "s", "converged s", "process", "cores", "MiB", "descriptors"):
        found.add_column(heading)
    for heading in ("lag p99 ms", "messages/s in, out", "kB/s in, out"):
        found.add_column(heading)
    for row in rows:
        head = (row["nodes"], row["models"], f"{row['routers']} ({row['real_routers']})", row["phase"], f"{row['seconds']:.1f}")
        converged = "" if row["converged_s"] is None else f"{row['converged_s']:.2f}"
        for process in row["processes"]:
            if process["process"] in ("orchestrator", "router-0"):
                found.add_row(*map(str, head), converged, *_cells(process, row["seconds"]))
    return found


def _cells(process: dict[str, Any], seconds: float) -> Iterator[str]:
    lag = process.get("loop_lag_p99_s")
    yield process["process"]
    yield f"{process['cores']:.3f}"
    yield f"{process['rss_bytes'] / 2**20:.0f}"
    yield str(process["descriptors"])
    yield "" if lag is None else f"{lag * 1e3:.4g}"
    yield f"{process['received_messages'] / seconds:,.0f}, {process['sent_messages'] / seconds:,.0f}"
    yield f"{process['received_bytes'] / seconds / 1e3:,.1f}, {process['sent_bytes'] / seconds / 1e3:,.1f}"
