"""`ryzanstein demo`: a two-node cluster, a conversation, and a node killed during an answer.

It exits at the end.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import ExitStack
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from ryzanstein.cli import display
from ryzanstein.cli.demo.demonstration import Demonstration, DemoReport
from ryzanstein.cli.demo.story import STORY
from ryzanstein.cli.processes.cluster import ClusterSpec, LocalCluster
from ryzanstein.cli.processes.ports import InUseError, require_able
from ryzanstein.cli.processes.service_process import ServiceFailedError
from ryzanstein.cli.programs import require
from ryzanstein.client import Answer
from ryzanstein.demo import MODEL_DIR
from ryzanstein.errors import RyzansteinError

NUM_NODES = 2
TP = 2
_MARGIN = 10
_FLAGS = ("--kv-bytes", str(16 * 2**20))  # one conversation: the demonstration fits in small containers


def demo(
    as_json: Annotated[bool, typer.Option("--json", help="Print only one JSON document on standard output.")] = False,
) -> None:
    """Run a small cluster and kill a node during an answer: nothing is lost. Exit code 1: a promise was broken."""
    require("demo", "router", "worker")
    out, people = Console(quiet=as_json, highlight=False), display.people()
    started_at = time.monotonic()
    try:
        require_able()
        report = _perform(out)
    except InUseError as taken:
        people.print(str(taken), style="red", markup=False, soft_wrap=True)
        raise typer.Exit(1) from None
    except ServiceFailedError as failure:
        display.show_failure(people, failure)
        raise typer.Exit(1) from None
    except RyzansteinError as error:
        people.print("a request failed:", style="bold red")
        display.show_error(people, error)
        raise typer.Exit(1) from None
    spent_s = time.monotonic() - started_at
    if as_json:
        display.print_json({**asdict(report), "kept": report.kept, "duration_s": spent_s})
    _summarize(out, report, spent_s)
    _name_broken(people, report)
    raise typer.Exit(0 if report.kept else 1)


def _perform(out: Console) -> DemoReport:
    """Starts the cluster, plays the story, and stops the cluster."""
    started_at = time.monotonic()
    with ExitStack() as stack:
        spec = ClusterSpec(MODEL_DIR, num_nodes=NUM_NODES, tp=TP, worker_flags=_FLAGS)
        cluster = LocalCluster(spec)
        stack.callback(cluster.stop)
        with display.waiting(out, f"starting {NUM_NODES} nodes of {TP} ranks, a router and an orchestrator ...") as doing:
            cluster.start(doing)
        if cluster.kernels:
            out.print(Text(cluster.kernels), soft_wrap=True)
        _introduce(out, time.monotonic() - started_at)
        return asyncio.run(Demonstration(cluster, STORY, Screen(out)).run())


class Screen:
    """Shows the demonstration as a dialogue.

    Each line of an answer begins with the node that generates it.
    """

    def __init__(self, out: Console) -> None:
        self._out = out
        self._speaker = ""

    def asked(self, text: str) -> None:
        self._speaker = ""
        self._out.print(Text.assemble((f"{'you':<{_MARGIN}}", "bold cyan"), text))

    def spoken(self, node_id: str, text: str) -> None:
        if node_id != self._speaker:
            self._end_line()
            self._speaker = node_id
            self._out.print(Text(f"{node_id:<{_MARGIN}}", style="bold green"), end="")
            text = text.lstrip()
        self._out.print(Text(text), end="", soft_wrap=True)

    def answered(self, answer: Answer) -> None:
        rate = "" if answer.tokens_per_s is None else f", {answer.tokens_per_s:.0f} tokens/s"
        figures = f"   [first token {display.milliseconds(answer.time_to_first_token_s)}{rate}]"
        self._out.print(Text(figures, style="dim"), soft_wrap=True)
        self._speaker = ""

    def compared(self, answer: Answer) -> None:
        self._out.print(
            Text(f"\nThe next answer, generated without a fault for comparison: {len(answer.token_ids)} tokens.", style="dim")
        )

    def killed(self, node_id: str, pid: int, num_tokens: int) -> None:
        self._end_line()
        self._speaker = ""
        self._out.print(Text(f"{'':<{_MARGIN}}SIGKILL {node_id} (pid {pid}) after token {num_tokens}", style="bold red"))

    def _end_line(self) -> None:
        if self._speaker:
            self._out.print()


def _introduce(out: Console, spent_s: float) -> None:
    started = f"{NUM_NODES} nodes of {TP} ranks, a router, an orchestrator: started in {spent_s:.1f} s"
    out.print(Panel.fit(started, title="Ryzanstein"))
    out.print(Text("One conversation in one session. On the left: you, or the node that answers.\n", style="dim"))


def _summarize(out: Console, report: DemoReport, spent_s: float) -> None:
    failover = report.failover
    table = Table("measured", "value", title=f"summary, {spent_s:.1f} s in total", title_justify="left")
    table.add_row("node killed", f"{failover.killed_node}, after {failover.killed_after_tokens} of {failover.tokens} tokens")
    table.add_row("continued on", failover.continued_on)
    table.add_row("tokens lost", str(failover.lost))
    table.add_row("tokens repeated", str(failover.repeated))
    table.add_row("identical to the undisturbed answer", "yes" if failover.identical else "NO")
    table.add_row("failover, detected to re-routed", _precise(failover.detected_to_rerouted_s))
    table.add_row("killed to next token, at the client", _precise(failover.killed_to_next_token_s))
    table.add_row("promises kept", f"{sum(p.kept for p in report.promises)} of {len(report.promises)}")
    out.print()
    out.print(table)


def _name_broken(people: Console, report: DemoReport) -> None:
    for promise in report.promises:
        if not promise.kept:
            people.print(Text(f"broken promise: {promise.name} ({promise.seen})", style="bold red"), soft_wrap=True)


def _precise(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.1f} ms"
