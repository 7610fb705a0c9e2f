"""`python -P -m ryzanstein.lab.soak`, or `ryzanstein bench soak`.

Exit codes: 0 nothing was lost and nothing grew; 1 something was or did; 2 wrong usage; 130 interrupted.
"""

from __future__ import annotations

import asyncio
import json
import shlex
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from ryzanstein.lab.load.workload import Shape
from ryzanstein.lab.output_files import check_writable
from ryzanstein.lab.soak.report import figures, misses, page
from ryzanstein.lab.soak.soak import Soak, SoakPlan, soak

_MISSED, _INTERRUPTED = 1, 130


def soak_command(
    *,
    minutes: Annotated[float, typer.Option(min=2, max=10_080, help="How long.")] = 120.0,
    share: Annotated[float, typer.Option(min=0.05, max=0.95, help="Of the requests that the cluster can serve.")] = 0.7,
    every: Annotated[float, typer.Option(min=20, max=3600, help="Seconds between two faults.")] = 60.0,
    seed: Annotated[int, typer.Option(min=0, max=2**31 - 1, help="The same seed gives the same faults and questions.")] = 0,
    json_path: Annotated[str, typer.Option("--json", help="File for the figures; - is standard output.")] = "-",
    report: Annotated[Path | None, typer.Option(dir_okay=False, help="File for the Markdown report.")] = None,
) -> None:
    """Serve a load for hours, with a fault a minute: nothing may be lost, and nothing may grow."""
    check_writable(None if json_path == "-" else Path(json_path), "--json")
    check_writable(report, "--report")
    plan = SoakPlan(60 * minutes, share, every, seed=seed, shape=Shape(num_input=64, num_output=96))
    seen = asyncio.run(_interruptible(plan))
    command = f".venv/bin/ryzanstein bench soak {shlex.join(sys.argv[1:])}".strip()
    found = figures(seen, command)
    text = json.dumps(found, indent=1)
    if json_path == "-":
        print(text)
    else:
        Path(json_path).write_text(text + "\n")
    if report is not None:
        report.write_text(page(found))
    for miss in misses(found):
        _tell(f"MISSED {miss}")
    if seen.broken == "interrupted":
        raise typer.Exit(_INTERRUPTED)
    raise typer.Exit(_MISSED if misses(found) else 0)


async def _interruptible(plan: SoakPlan) -> Soak:
    """Runs the soak. SIGTERM and SIGINT end it and everything that it started; what was seen until then is reported."""
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    return await soak(plan, _tell)


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> int:
    """Runs the program and returns its exit code."""
    try:
        typer.run(soak_command)
    except asyncio.CancelledError:
        return _INTERRUPTED
    return 0


if __name__ == "__main__":
    sys.exit(main())
