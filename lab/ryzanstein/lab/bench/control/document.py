"""What a run of `ryzanstein bench control` found, as JSON and as a table."""

from __future__ import annotations

import platform
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
    """Returns a table for people: a line for each phase, with the orchestrator, a router and what watches."""
    found = Table(title=f"the control plane on {platform.node()}")
    for heading in ("nodes", "models", "routers (real)", "phase", "s", "converged s"):
        found.add_column(heading)
    for service in ("orchestrator", "router"):
        for heading in ("cores", "MiB", "fds", "lag p99 ms", "messages/s in, out", "kB/s in, out"):
            found.add_column(f"{service} {heading}")
    for row in rows:
        head = (row["nodes"], row["models"], f"{row['routers']} ({row['real_routers']})", row["phase"], f"{row['seconds']:.1f}")
        converged = "" if row["converged_s"] is None else f"{row['converged_s']:.2f}"
        cells = [cell for name in ("orchestrator", "router-0") for cell in _cells(row, name)]
        found.add_row(*map(str, head), converged, *cells)
    return found


def _cells(row: dict[str, Any], name: str) -> Iterator[str]:
    process = next((each for each in row["processes"] if each["process"] == name), None)
    if process is None:
        yield from [""] * 6
        return
    lag, seconds = process.get("loop_lag_p99_s"), row["seconds"]
    yield f"{process['cores']:.3f}"
    yield f"{process['rss_bytes'] / 2**20:.0f}"
    yield str(process["descriptors"])
    yield "" if lag is None else f"{lag * 1e3:.4g}"
    yield f"{process['received_messages'] / seconds:,.0f}, {process['sent_messages'] / seconds:,.0f}"
    yield f"{process['received_bytes'] / seconds / 1e3:,.1f}, {process['sent_bytes'] / seconds / 1e3:,.1f}"
