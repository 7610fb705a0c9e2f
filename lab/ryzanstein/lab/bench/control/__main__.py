"""`python -P -m ryzanstein.lab.bench.control`, or `ryzanstein bench control`: the control plane at many nodes.

Exit codes: 0 the cluster became what it should be in every phase, 1 it did not in time, or something did not start;
2 wrong usage; 143 SIGTERM ended it, and the document has what was measured until then.
"""

from __future__ import annotations

import asyncio
import json
import signal
import tempfile
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
import uvloop
from rich.console import Console

from ryzanstein.errors import RyzansteinError
from ryzanstein.lab.bench.control.cluster import control_cluster
from ryzanstein.lab.bench.control.document import document, table
from ryzanstein.lab.bench.control.phases import ControlPhases
from ryzanstein.lab.bench.control.plan import ControlCell, ControlPlan
from ryzanstein.lab.bench.descriptors import raise_descriptor_limit
from ryzanstein.lab.bench.disturbance import Watch
from ryzanstein.lab.output_files import check_writable

_DEFAULT = ControlPlan()
_MOST_NODES, _MOST_ROUTERS, _MOST_MODELS = 10_000, 100, 32


def control(  # noqa: PLR0917 - the command's options
    nodes: Annotated[str, typer.Option(help="Numbers of nodes, comma-separated.")] = "10,100",
    routers: Annotated[str, typer.Option(help="Numbers of routers; two are real, the others only watch.")] = "1,3",
    models: Annotated[str, typer.Option(help="Numbers of models on each node.")] = "1",
    seconds: Annotated[float, typer.Option(min=1, max=600, help="Idle, busy, and with changes.")] = _DEFAULT.window_s,
    silence: Annotated[float, typer.Option(min=6, max=600, help="How long half of the nodes are silent.")] = _DEFAULT.silence_s,
    limit: Annotated[
        float, typer.Option(min=1, max=3600, help="For each wait until the cluster converges.")
    ] = _DEFAULT.limit_s,
    streams: Annotated[int, typer.Option(min=1, max=2000, help="Answers while busy, at most one a node.")] = _DEFAULT.streams,
    json_path: Annotated[str, typer.Option("--json", help="File for the figures; - is standard output.")] = "",
) -> None:
    """Measure orchestrator and routers at many nodes: joins, beats, changes, departures, a restart, a partition."""
    check_writable(None if json_path in ("", "-") else Path(json_path), "--json")
    raise_descriptor_limit()
    people, watch = Console(stderr=True, highlight=False), Watch()
    plan = ControlPlan(seconds, silence, limit, streams)
    numbers = [
        _numbers(*option)
        for option in (("nodes", nodes, _MOST_NODES), ("routers", routers, _MOST_ROUTERS), ("models", models, _MOST_MODELS))
    ]
    cells = [ControlCell(n, r, m) for n in numbers[0] for r in numbers[1] for m in numbers[2]]
    found = Findings()
    try:
        uvloop.run(_until_terminated(_measure(cells, plan, found, people)))
    except asyncio.CancelledError:
        code = 128 + signal.SIGTERM  # what was measured until then is of use
    else:
        code = 1 if found.failed else 0
    seen = watch.stop()
    content = document(plan, found.rows, found.failed) | {"disturbance": seen.document(), "complete": code < 128}
    if json_path == "-":
        print(json.dumps(content, indent=1))
    elif json_path:
        Path(json_path).write_text(json.dumps(content, indent=1) + "\n")
    else:
        Console(width=180).print(table(found.rows))
    for line in (str(seen), *found.failed):
        people.print(line, markup=False, soft_wrap=True)
    raise typer.Exit(code)


@dataclass(slots=True)
class Findings:
    """A row for each phase of each cell, and what did not become what it should be."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)


async def _measure(cells: Sequence[ControlCell], plan: ControlPlan, found: Findings, people: Console) -> None:
    """Measures each cell on a cluster of its own. One that fails leaves its further phases out."""
    for cell in cells:
        with tempfile.TemporaryDirectory(prefix="control-") as folder:
            try:
                async with control_cluster(cell, Path(folder)) as cluster:
                    phases = ControlPhases(cell, plan, cluster, lambda line: people.print(line, markup=False))
                    try:
                        await phases.run()
                    finally:
                        found.rows += phases.rows
                        found.failed += phases.failed
            except RyzansteinError as error:
                found.failed.append(f"{cell}: {error.message}")


async def _until_terminated(work: Coroutine[None, None, None]) -> None:
    """Runs the work. SIGTERM cancels it, so that what was started is stopped."""
    task = asyncio.create_task(work)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    await task


def _numbers(option: str, text: str, most: int) -> list[int]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    least = 2 if option == "nodes" else 1
    if not parts or not all(part.isdecimal() and least <= int(part) <= most for part in parts):
        raise typer.BadParameter(f"must be numbers from {least} to {most}: {text!r}", param_hint=f"--{option}")
    return list(dict.fromkeys(map(int, parts)))


if __name__ == "__main__":
    typer.run(control)
