"""`ryzanstein debug`: what is oldest in a cluster and where it is, and everything of one service."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from ryzanstein.cli import display
from ryzanstein.cli.access.dialing import TlsDir, dialer_in
from ryzanstein.cli.access.keyed_router import KeyFile, keyed_router
from ryzanstein.cli.access.router_trust import CaFile
from ryzanstein.cli.debug.bundle import write_bundle
from ryzanstein.cli.debug.evidence import Evidence, Questions, as_dict, ask_all, services_of
from ryzanstein.cli.debug.report import everything, headlines, request_table, way
from ryzanstein.cli.logs.command import StateDir
from ryzanstein.cli.options import ORCHESTRATOR_ADDRESS, ROUTER_ADDRESS, Orchestrator, Router, text_value
from ryzanstein.cli.status.command import as_document
from ryzanstein.files.state_home import state_home
from ryzanstein.rpc.client import Dialer
from ryzanstein.survey.look import look
from ryzanstein.survey.reach import KeyedRouter
from ryzanstein.survey.views import ClusterStatus


def debug(
    service: Annotated[
        str,
        typer.Argument(
            metavar="[SERVICE]", show_default=False, help="A node, the router or `orchestrator`: all of its stacks."
        ),
    ] = "",
    *,
    request: Annotated[
        str, typer.Option(callback=text_value, help="The way of this request, generation, or response of the HTTP API.")
    ] = "",
    older_than: Annotated[float, typer.Option(min=0, max=86_400, help="Only requests of so many seconds or more.")] = 0.0,
    bundle: Annotated[
        Path | None,
        typer.Option("--zip", dir_okay=False, help="Write what all services say, and their last log lines, to a new file."),
    ] = None,
    orchestrator: Orchestrator = ORCHESTRATOR_ADDRESS,
    router: Router = ROUTER_ADDRESS,
    key_file: KeyFile = None,
    ca: CaFile = None,
    tls_dir: TlsDir = None,
    state_dir: StateDir = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Show which requests are oldest and where they are, the way of one, or what one service does.

    It changes nothing. A router shows it only to a key with the scope `debug`, or where strangers do not reach it.

    Exit code 1: a service did not answer, or there is no such request or service.
    """
    questions = Questions(request, older_than, bundle is not None)
    view, found = asyncio.run(_asked(orchestrator, keyed_router(router, key_file, ca), dialer_in(tls_dir), questions))
    if service:
        found = [each for each in found if each.name == service]
        if not found:
            _end(f"no service is called {service}: there are {', '.join(_names(view))}")
    if request and not any(each.requests for each in found):
        _end(f"no service has a request or generation {request} that has not ended", *_silent(found))
    if bundle is not None:
        _write(bundle, view, found, state_dir)
    elif as_json:
        display.print_json({"headlines": list(headlines(found)), "services": [_document(each) for each in found]})
    elif request:
        _print(way(found))
    elif service:
        _print(everything(found[0]))
    else:
        lines = list(headlines(found))
        _print(lines or ["no request runs, and nothing stands still"])
        if len(table := request_table(found)):
            display.output().print(table)
    raise typer.Exit(1 if any(each.error for each in found) else 0)


async def _asked(
    orchestrator: str, router: KeyedRouter, dialer: Dialer, questions: Questions
) -> tuple[ClusterStatus, list[Evidence]]:
    view = await look(orchestrator, router, dialer)
    return view, await ask_all(services_of(view, orchestrator, router), dialer, questions)


def _names(view: ClusterStatus) -> list[str]:
    return [view.router.router_id or "router", *(each.node.node_id for each in view.nodes if not each.further), "orchestrator"]


def _silent(found: list[Evidence]) -> list[str]:
    return [f"{each.name} does not answer: {each.error}" for each in found if each.error]


def _print(lines: Iterable[str]) -> None:
    for line in lines:
        print(line)


def _end(*lines: str) -> None:
    for line in lines:
        display.people().print(line, style="red", markup=False, soft_wrap=True)
    raise typer.Exit(1)


def _write(path: Path, view: ClusterStatus, found: list[Evidence], state_dir: Path | None) -> None:
    try:
        size = write_bundle(path, as_document(view), found, state_dir or state_home())
    except FileExistsError:
        _end(f"{path} is there already")
    except OSError as error:
        _end(f"{path} cannot be written: {error.strerror}")
    else:
        display.people().print(f"{path}: {display.binary_bytes(size)}", markup=False, soft_wrap=True)


def _document(evidence: Evidence) -> dict[str, Any]:
    return {
        "service": evidence.name,
        "address": evidence.service.address,
        "error": evidence.error,
        "requests": [as_dict(each) for each in evidence.requests],
        "stacks": None if evidence.stacks is None else as_dict(evidence.stacks),
    }
