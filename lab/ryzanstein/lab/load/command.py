"""`ryzanstein load`: sends a load to routers that run, measures what it gets and checks every token."""

from __future__ import annotations

import asyncio
import json
import random
import shlex
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib.util import find_spec
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.live import Live
from rich.text import Text

from ryzanstein.addresses import split_address
from ryzanstein.cli import display
from ryzanstein.cli.access.keyed_router import KeyFile, keyed_router
from ryzanstein.cli.access.router_trust import CaFile
from ryzanstein.cli.options import HTTP_PORT, ROUTER_ADDRESS, address_value, text_value
from ryzanstein.errors import RyzansteinError
from ryzanstein.lab.clients.question import LoadQuestion
from ryzanstein.lab.clients.transport import RouterAddress
from ryzanstein.lab.load.arrivals import constant, poisson
from ryzanstein.lab.load.mooncake import TraceFileError, TraceRow, read_trace
from ryzanstein.lab.load.objectives import ObjectiveError, Objectives
from ryzanstein.lab.load.page import page
from ryzanstein.lab.load.report import document, flawless, tables, window_of
from ryzanstein.lab.load.run import LoadBounds, LoadRun
from ryzanstein.lab.load.workload import Shape, conversations, recorded
from ryzanstein.lab.machine import machine
from ryzanstein.lab.output_files import check_writable

_FLAWED = 1
_LINE_EVERY_S, _LIVE_EVERY_S = 10.0, 0.5
_DAY_S = 86_400.0


class Face(StrEnum):
    """A face of the router."""

    GRPC = "grpc"
    HTTP = "http"
    WEBSOCKET = "ws"


_TRANSPORTS = {Face.GRPC: "grpc", Face.HTTP: "sse", Face.WEBSOCKET: "websocket"}


@dataclass(frozen=True, slots=True)
class Plan:
    """How requests come: on `streams`, or at `times` in an open loop."""

    questions: Iterator[LoadQuestion]
    streams: int = 0
    times: Iterator[float] | None = None

    async def follow(self, run: LoadRun) -> None:
        if self.times is None:
            await run.closed(self.questions, self.streams)
        else:
            await run.open(self.questions, self.times)


def _addresses(values: list[str]) -> list[str]:
    return [address_value(value) or "" for value in values]


def load(
    *,
    router: Annotated[
        list[str] | None,
        typer.Option(
            callback=lambda values: _addresses(values or []),
            help=f"gRPC host:port of a router ({ROUTER_ADDRESS}); may be repeated.",
        ),
    ] = None,
    http: Annotated[
        list[str] | None,
        typer.Option(
            callback=lambda values: _addresses(values or []),
            help=f"HTTP host:port of the same routers, in the same order (the host of --router, port {HTTP_PORT}).",
        ),
    ] = None,
    face: Annotated[Face, typer.Option(help="Face of the router.")] = Face.GRPC,
    streams: Annotated[int | None, typer.Option(min=1, max=10_000, help="Closed loop: so many requests at a time (4).")] = None,
    rate: Annotated[
        float | None, typer.Option(min=0.001, max=100_000, help="Open loop: so many requests a second, whatever happens.")
    ] = None,
    poisson_arrivals: Annotated[bool, typer.Option("--poisson", help="Open loop: at random times, not evenly.")] = False,
    trace: Annotated[
        Path | None,
        typer.Option(dir_okay=False, exists=True, help="Open loop: requests as a Mooncake trace has them (JSON lines)."),
    ] = None,
    speed: Annotated[float, typer.Option(min=0.001, max=1000, help="Plays the trace so many times as fast.")] = 1.0,
    seconds: Annotated[
        float | None, typer.Option(min=1, max=_DAY_S, help="No request comes after this time (30, or the whole trace).")
    ] = None,
    requests: Annotated[int | None, typer.Option(min=1, max=10**7, help="No conversation comes after so many.")] = None,
    warmup: Annotated[
        float, typer.Option(min=0, max=3600, help="Seconds at the start that are checked but not measured.")
    ] = 2.0,
    num_input: Annotated[int, typer.Option("--input", min=1, max=10**6, help="Tokens of each message, about.")] = 64,
    num_output: Annotated[int, typer.Option("--output", min=1, max=10**6, help="Tokens of each answer.")] = 64,
    turns: Annotated[int, typer.Option(min=1, max=100, help="Messages of each conversation, in one session.")] = 1,
    prompts: Annotated[int, typer.Option(min=1, max=10**6, help="Number of different conversations.")] = 32,
    temperature: Annotated[float, typer.Option(min=0, max=2, help="0 is greedy. Draws have a seed.")] = 0.7,
    model: Annotated[str, typer.Option(callback=text_value, help="Required if the cluster serves several models.")] = "",
    objective: Annotated[str, typer.Option(help="Bounds in seconds for goodput, such as ttft=0.5,tpot=0.05,e2e=20.")] = "",
    wait: Annotated[bool, typer.Option(help="Ask again, for up to 30 seconds, when a router is full and says when.")] = True,
    compare: Annotated[
        bool, typer.Option(help="Answers to the same question must be equal; not so where other engines answer in batches.")
    ] = True,
    most_open: Annotated[
        int, typer.Option(min=1, max=20_000, help="Open loop: requests beyond so many wait; their time counts.")
    ] = 1000,
    seed: Annotated[int, typer.Option(min=0, max=2**31 - 1, help="The same seed gives the same questions and times.")] = 0,
    key_file: KeyFile = None,
    ca: CaFile = None,
    json_path: Annotated[str, typer.Option("--json", help="File for the figures; - is standard output.")] = "",
    page_path: Annotated[Path | None, typer.Option("--page", dir_okay=False, help="File for an HTML page with plots.")] = None,
) -> None:
    """Send a load to a cluster: measure it, and check that no token is lost, repeated or changed.

    Exit code 1: an answer was lost, changed or failed.
    """
    people = display.people()
    objectives = _objectives(objective)
    check_writable(None if json_path in ("", "-") else Path(json_path), "--json")
    check_writable(page_path, "--page")
    rows = _rows(trace, speed)
    loops = [name for name, value in (("--streams", streams), ("--rate", rate), ("--trace", trace)) if value is not None]
    if len(loops) > 1:
        raise typer.BadParameter("give one of them", param_hint=", ".join(loops))
    if poisson_arrivals and rate is None:
        raise typer.BadParameter("needs --rate", param_hint="--poisson")
    if page_path is not None and find_spec("matplotlib") is None:
        raise typer.BadParameter("needs matplotlib: pip install 'ryzanstein-lab[page]'", param_hint="--page")
    shape = Shape(num_input, num_output, turns, temperature, _TRANSPORTS[face], model)
    seconds = seconds if seconds is not None or rows is not None or requests is not None else 30.0
    bounds = LoadBounds(seconds, requests, most_open, wait, compare and rows is None)
    run = LoadRun(_routers(router or [ROUTER_ADDRESS], http or [], key_file, ca), bounds, seed)

    def planned(measured: Shape) -> Plan:
        if rows is not None:
            return Plan(recorded(rows, measured, seed), times=iter([row.at_s for row in rows]))
        questions = conversations(measured, prompts, seed)
        if rate is None:
            return Plan(questions, streams or 4)
        return Plan(questions, times=poisson(rate, random.Random(seed)) if poisson_arrivals else constant(rate))

    try:
        whole = asyncio.run(_sent(run, shape, planned, people))
    except RyzansteinError as error:
        display.show_error(people, error)
        raise typer.Exit(_FLAWED) from None
    figures = {
        "command": f"ryzanstein load {shlex.join(sys.argv[1:])}".strip(),
        "machine": machine(),
        "whole": whole,
        **document(run, window_of(run, warmup, seconds), objectives),
    }
    _publish(figures, run, json_path, page_path)
    if not whole:
        raise typer.Exit(130)
    raise typer.Exit(0 if flawless(figures["verdict"]) else _FLAWED)


async def _sent(run: LoadRun, shape: Shape, planned: Any, people: Console) -> bool:
    """Follows the plan. Returns False if it was interrupted: what ended until then counts. Raises RyzansteinError."""
    plan = planned(await run.measure(shape))
    task = asyncio.ensure_future(plan.follow(run))
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    shown = asyncio.ensure_future(_show(run, people))
    try:
        await task
    except asyncio.CancelledError:
        return False
    finally:
        shown.cancel()
    return True


async def _show(run: LoadRun, people: Console) -> None:
    """Shows the state of the run: a line that is replaced, or, where there is no terminal, one in ten seconds."""
    if not people.is_terminal:
        while True:
            await asyncio.sleep(_LINE_EVERY_S)
            people.print(_line(run), soft_wrap=True)
    with Live(console=people, auto_refresh=False, transient=True) as live:
        while True:
            live.update(Text(_line(run)), refresh=True)
            await asyncio.sleep(_LIVE_EVERY_S)


def _line(run: LoadRun) -> str:
    now_s = time.monotonic() - run.started if run.started else 0.0
    lately = [each.ttft_s for each in run.outcomes[-100:] if each.first]
    first = f", first token {sorted(lately)[len(lately) // 2] * 1e3:.0f} ms" if lately else ""
    return (
        f"{now_s:.0f} s: {run.num_came} came, {run.num_open} open, {len(run.outcomes)} answers, "
        f"{run.num_tokens / max(now_s, 1e-9):.0f} tokens/s{first}, {run.num_refused} refused, {run.num_wrong} wrong"
    )


def _publish(figures: dict[str, Any], run: LoadRun, json_path: str, page_path: Path | None) -> None:
    text = json.dumps(figures, indent=1)
    if json_path == "-":
        print(text)
    elif json_path:
        Path(json_path).write_text(text + "\n")
    if page_path is not None:
        page_path.write_text(page(figures, run.outcomes, run.started))
    if json_path != "-":
        for table in tables(figures):
            display.output().print(table)
    for example in figures["verdict"]["examples"]:
        display.people().print(Text(example, style="red"), soft_wrap=True)


def _routers(grpc: Sequence[str], http: Sequence[str], key_file: Path | None, ca: Path | None) -> list[RouterAddress]:
    if len(http) > len(grpc):
        raise typer.BadParameter("has more addresses than --router", param_hint="--http")
    addresses = []
    for address, face in zip_longest(grpc, http):
        known = keyed_router(address, key_file, ca)
        host, port = split_address(face) if face else (_host(address), HTTP_PORT)
        roots = known.trust.roots if known.trust is not None else b""
        addresses.append(RouterAddress(address, host, port, known.key, roots))
    return addresses


def _host(address: str) -> str:
    return "127.0.0.1" if address.startswith("unix:") else split_address(address)[0]


def _objectives(text: str) -> Objectives:
    try:
        return Objectives.read(text)
    except ObjectiveError as wrong:
        raise typer.BadParameter(str(wrong), param_hint="--objective") from None


def _rows(path: Path | None, speed: float) -> list[TraceRow] | None:
    if path is None:
        return None
    try:
        return read_trace(path, speed)
    except (OSError, TraceFileError) as wrong:
        raise typer.BadParameter(f"{path}: {wrong}", param_hint="--trace") from None


def main() -> None:
    """Runs the program."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(name="load")(load)
    app()
