"""`python -P -m ryzanstein.lab.chaos`, or `ryzanstein bench failover`: measures what each fault costs.

Exit codes: 0 all targets were met; 1 a row lost, repeated, changed or failed something, or missed a
target, or a secret was where it does not belong; 2 wrong usage; 3 some faults cannot be tried on this machine; 130 interrupted.
"""

from __future__ import annotations

import asyncio
import json
import shlex
import signal
import sys
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer

from ryzanstein.lab.chaos.campaign import Campaign, Order, Results
from ryzanstein.lab.chaos.catalog import CATALOG, UnknownFaultError, chosen
from ryzanstein.lab.chaos.machines.network import HostNetwork, NetworkImpossibleError
from ryzanstein.lab.chaos.report.document import CampaignFacts as Made
from ryzanstein.lab.chaos.report.document import document
from ryzanstein.lab.chaos.report.page import page
from ryzanstein.lab.chaos.report.progress import Conditions, ForeignProgressError, Progress
from ryzanstein.lab.machine import cpu
from ryzanstein.process.allotment import whole_cores

CLIENTS = 3
MISSED, NOT_RUN = 1, 3


def failover(
    *,
    json_path: Annotated[str, typer.Option("--json", help="File for the figures; - is standard output.")] = "-",
    runs: Annotated[int, typer.Option(min=1, max=1000, help="Runs of each fault.")] = 30,
    minutes: Annotated[
        float | None,
        typer.Option(min=1, max=10_000, help="Start no further run after this time. Every fault is tried once in any case."),
    ] = None,
    only: Annotated[str, typer.Option(help="Names of the faults to run, separated by commas.")] = "",
    report: Annotated[Path | None, typer.Option(dir_okay=False, help="File for the Markdown report.")] = None,
    seed: Annotated[str, typer.Option(help="The same seed gives the same schedule.")] = "ryzanstein",
    clients: Annotated[int, typer.Option(min=2, max=64, help="Number of concurrent clients.")] = CLIENTS,
    progress_path: Annotated[
        Path | None,
        typer.Option("--progress", dir_okay=False, help="File of finished runs, to continue from after an interruption."),
    ] = None,
    keep: Annotated[Path | None, typer.Option(file_okay=False, help="Directory for the services' logs.")] = None,
    secure: Annotated[
        bool, typer.Option("--secure", help="Clusters with TLS between the services, and clients with a key.")
    ] = False,
    list_faults: Annotated[bool, typer.Option("--list", help="List the faults.")] = False,
) -> None:
    """Inject faults into a cluster under load and measure the effect of each on the clients."""
    if list_faults:
        for fault in CATALOG:
            print(f"{fault.name:32} {fault.what}")
        return
    try:
        faults = chosen([name for name in only.split(",") if name])
    except UnknownFaultError as unknown:
        raise typer.BadParameter(str(unknown), param_hint="--only") from None
    order = Order(faults, runs, clients, seed, keep, None if minutes is None else 60 * minutes, secure)
    try:
        progress = Progress(progress_path, Conditions(version("ryzanstein"), cpu(), whole_cores(), seed, clients, secure))
    except ForeignProgressError as foreign:
        raise typer.BadParameter(str(foreign), param_hint="--progress") from None
    if progress.runs:
        _tell(f"continuing after {len(progress.runs)} runs")
    results = _run(order, progress)
    made = Made(_command(), seed, runs, clients, progress.took_s, results.not_run)
    text = json.dumps(document(results.rows, made), indent=1)
    if json_path == "-":
        print(text)
    else:
        Path(json_path).write_text(text + "\n")
    if report is not None:
        report.write_text(page(results.rows, made))
    progress.finish()
    raise typer.Exit(_verdict(results))


def _run(order: Order, progress: Progress) -> Results:
    with ExitStack() as stack:
        try:
            network = stack.enter_context(HostNetwork())
        except NetworkImpossibleError as impossible:
            network = None
            _tell(f"NO NETWORK NAMESPACES, faults of the network are NOT RUN: {impossible}")
        return asyncio.run(_interruptible(Campaign(order, _tell, network, progress)))


def _verdict(results: Results) -> int:
    """Reports all misses and faults that were not run. Returns the exit code."""
    for row in results.rows:
        for miss in row.misses:
            _tell(f"MISSED {row.fault.name}: {miss}")
    for name, why in results.not_run.items():
        _tell(f"NOT RUN {name}: {why}")
    for place in results.exposed:
        _tell(f"EXPOSED: a secret is in {place}")
    if results.exposed or any(row.misses for row in results.rows):
        return MISSED
    return NOT_RUN if results.not_run else 0


async def _interruptible(campaign: Campaign) -> Results:
    """Runs the campaign. SIGTERM and SIGINT end everything that was started first."""
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    return await campaign.run()


def _command() -> str:
    return f".venv/bin/ryzanstein bench failover {shlex.join(sys.argv[1:])}".strip()


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> int:
    """Runs the program and returns its exit code."""
    try:
        typer.run(failover)
    except (KeyboardInterrupt, asyncio.CancelledError):
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
