"""`ryzanstein deploy`: states which model nodes should serve, and waits until they do.

It asks the orchestrator alone, and a node only why it failed.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from ryzanstein.cli import display
from ryzanstein.cli.access.dialing import TlsDir, dialer_in
from ryzanstein.cli.options import ORCHESTRATOR_ADDRESS, Orchestrator, text_value
from ryzanstein.cli.rollout.deployments import Assignments, DeploymentClient, as_document, deployment_table, names, reason_of
from ryzanstein.cli.rollout.phases import Phase
from ryzanstein.cli.rollout.rollout import Rollout, RolloutEnd
from ryzanstein.cli.rollout.shortages import listed_shortages
from ryzanstein.cluster import Deployment, RolloutLimits
from ryzanstein.errors import Code, RyzansteinError
from ryzanstein.files.model_paths import is_gguf, model_location, model_name
from ryzanstein.files.models_home import model_path
from ryzanstein.generation.prompts import name_fault
from ryzanstein.rpc.client import Dialer

WAIT_S = 300.0
MAX_NODES = 10_000
MAX_IDLE_S = 30 * 86_400.0
MAX_PATH_CHARS = 1024
_LOOK_EVERY_S = 0.2
_TARGET = "'DIR|NAME'"
_BY_SETTING = "tuning.rollout"


def deploy(
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="DIR|NAME",
            callback=text_value,
            help="Directory of the model in the Hugging Face layout; the nodes read it, under this path. "
            "--remove, --rollback: a name.",
        ),
    ] = None,
    *,
    name: Annotated[
        str | None, typer.Option(callback=text_value, show_default="the directory's", help="Name that requests give.")
    ] = None,
    nodes: Annotated[
        int | None, typer.Option(min=0, max=MAX_NODES, show_default="every node", help="Nodes that serve it; 0: every node.")
    ] = None,
    idle_unload: Annotated[
        float | None,
        typer.Option(
            min=0, max=MAX_IDLE_S, show_default="never", help="Unload it after this many seconds without work; 0: never."
        ),
    ] = None,
    min_nodes: Annotated[
        int | None,
        typer.Option(min=0, max=MAX_NODES, show_default="no bound", help="Nodes that stay ready."),
    ] = None,
    max_nodes: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=MAX_NODES,
            show_default="one more than --nodes",
            help="Nodes that have it at once.",
        ),
    ] = None,
    max_unavailable: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1,
            show_default=_BY_SETTING,
            help="Share of the nodes that change at once.",
        ),
    ] = None,
    min_ready: Annotated[
        float | None,
        typer.Option(min=0, max=3600, show_default=_BY_SETTING, help="Seconds ready until the next changes."),
    ] = None,
    progress: Annotated[
        float | None,
        typer.Option(min=1, max=86_400, show_default=_BY_SETTING, help="Seconds without progress that halt it."),
    ] = None,
    max_failed: Annotated[
        float | None,
        typer.Option(min=0, max=1, show_default=_BY_SETTING, help="Share of the nodes that may fail."),
    ] = None,
    rollback: Annotated[bool, typer.Option("--rollback", help="Deploy the earlier directory of NAME again.")] = False,
    reload: Annotated[bool, typer.Option("--reload", help="Load the files again, although the directory is the same.")] = False,
    allow_outage: Annotated[bool, typer.Option("--allow-outage", help="Change replicas that cannot be spared, too.")] = False,
    orchestrator: Orchestrator = ORCHESTRATOR_ADDRESS,
    wait: Annotated[
        float | None, typer.Option(min=0, max=86_400, show_default=f"{WAIT_S:g}", help="Seconds to wait until nodes are ready.")
    ] = None,
    no_wait: Annotated[bool, typer.Option("--no-wait", help="Return when the deployment is stored.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Deploy DIR even if it exists here and is no model.")] = False,
    remove: Annotated[bool, typer.Option("--remove", help="Withdraw the deployment NAME.")] = False,
    list_all: Annotated[bool, typer.Option("--list", help="List the deployments.")] = False,
    tls_dir: TlsDir = None,
    as_json: Annotated[bool, typer.Option("--json", help="With --list: print one JSON document.")] = False,
) -> None:
    """Deploy a model to nodes and wait until they serve it; or --remove it, or --list all.

    The nodes read the directory, so it must be there on each of them.

    A relative path is resolved here. Nodes keep their other models as far as these fit beside it.

    The same name with another directory, or --reload, replaces the model in waves, of one node at first.

    Exit code 1: refused, no node is free, a node failed, or not ready in time. Only a refused one is not in force.
    """
    given: dict[str, object] = {"--name": name, "--nodes": nodes, "--idle-unload": idle_unload, "--reload": reload}
    given |= {"--min-nodes": min_nodes, "--max-nodes": max_nodes, "--max-unavailable": max_unavailable, "--force": force}
    given |= {"--min-ready": min_ready, "--progress": progress, "--max-failed": max_failed}
    if list_all or remove:
        given |= {"--wait": wait, "--no-wait": no_wait, "--allow-outage": allow_outage, "--rollback": rollback}
        given |= {"--remove": remove, _TARGET: target} if list_all else {"--json": as_json}
        _refuse_with("--list" if list_all else "--remove", given)
    elif rollback:
        _refuse_with("--rollback", given)
    elif as_json:
        raise typer.BadParameter("is for --list", param_hint="'--json'")
    if wait is not None and no_wait:
        raise typer.BadParameter("contradicts --wait", param_hint="'--no-wait'")
    place = _Place(orchestrator, dialer_in(tls_dir))
    try:
        if list_all:
            _list(place, as_json)
        elif remove:
            _remove(place, _name(target, _TARGET))
        else:
            limits = RolloutLimits(max_unavailable, min_ready, progress, max_failed, allow_outage)
            if rollback:
                deployment = Deployment(_name(target, _TARGET), "", rollout=limits)
            else:
                deployment = replace(
                    _deployment(target, name, nodes, force),
                    idle_unload_s=idle_unload or 0.0,
                    min_replicas=min_nodes or 0,
                    max_replicas=max_nodes or 0,
                    rollout=limits,
                )
            waiting = _Waiting(place, deployment, reload=reload, rollback=rollback)
            _deploy(waiting, None if no_wait else WAIT_S if wait is None else wait)
    except RyzansteinError as error:
        display.show_error(display.people(), error)
        raise typer.Exit(1) from None


@dataclass(frozen=True, slots=True)
class _Place:
    """Where the orchestrator is, and how it is dialled."""

    orchestrator: str
    dialer: Dialer

    def client(self) -> DeploymentClient:
        return DeploymentClient(self.orchestrator, self.dialer)


def _refuse_with(mode: str, given: Mapping[str, object]) -> None:
    """Raises BadParameter for the first option that was given and means nothing in this mode."""
    for option, value in given.items():
        if value is not None and value is not False:
            raise typer.BadParameter(f"has no meaning with {mode}", param_hint=option if option == _TARGET else f"'{option}'")


def _deployment(target: str | None, name: str | None, nodes: int | None, force: bool) -> Deployment:
    """Returns the deployment. Raises BadParameter, which names the option and its bound."""
    if not target:
        raise typer.BadParameter("give the directory of a model, or --list", param_hint=_TARGET)
    path = os.path.abspath(model_path(target))  # not resolved: links are the nodes' matter
    if len(path) > MAX_PATH_CHARS:
        raise typer.BadParameter(f"must have at most {MAX_PATH_CHARS} characters, got {len(path)}", param_hint=_TARGET)
    is_model = is_gguf(Path(path)) or os.path.isfile(os.path.join(model_location(Path(path)), "config.json"))
    if os.path.exists(path) and not is_model and not force:
        why = f"{path} has no config.json" if os.path.isdir(path) else f"{path} is neither a directory nor a GGUF file"
        raise typer.BadParameter(f"{why}; --force deploys it anyway, if the nodes have a model there", param_hint=_TARGET)
    return Deployment(_name(model_name(Path(path)) if name is None else name, "'--name'"), path, nodes or 0)


def _name(name: str | None, option: str) -> str:
    if fault := name_fault(name or ""):
        raise typer.BadParameter(fault, param_hint=option)
    return str(name)


def _list(place: _Place, as_json: bool) -> None:
    async def look() -> Assignments:
        async with place.client() as client:
            return await client.look()

    views = list(asyncio.run(look()).deployments.values())
    if as_json:
        display.print_json(as_document(views))
    elif views:
        display.output().print(deployment_table(views))
        for view in views:
            if listed := listed_shortages(view):
                display.output().print(f"{view.deployment.model!r}: {listed}", markup=False, soft_wrap=True)
    else:
        _tell("nothing is deployed: each node serves what it was started with")


def _remove(place: _Place, model: str) -> None:
    async def remove() -> tuple[str, ...]:
        async with place.client() as client:
            view = (await client.look()).deployments.get(model)
            await client.remove(model)
            return () if view is None else view.assigned

    had = asyncio.run(remove())
    after = "; what was started there and gave way comes back, as far as it fits" if had else ""
    _tell(f"{model!r} is removed from {names(had)}{after}" if had else f"{model!r} is removed; no node was assigned")


def _deploy(waiting: _Waiting, wait_s: float | None) -> None:
    """Deploys and waits; None: does not wait. Exits with code 1 when the model is not ready, 130 when interrupted."""
    try:
        ending = asyncio.run(waiting.run(wait_s))
    except KeyboardInterrupt:
        _tell(waiting.interrupted())
        raise typer.Exit(130) from None
    if ending.ready:
        _tell(ending.sentence)
        return
    display.people().print(f"{ending.sentence}{waiting.remedy(ending)}", style="red", markup=False, soft_wrap=True)
    raise typer.Exit(1)


class _Waiting:
    """Runs one deployment to its end and prints its progress."""

    def __init__(self, place: _Place, deployment: Deployment, *, reload: bool, rollback: bool) -> None:
        self._place = place
        self._deployment = deployment
        self._reload, self._rollback = reload, rollback
        self._waits_for = ""
        self._rollout = Rollout(deployment)
        self._reasons: dict[str, str] = {}
        self._displaced: set[str] = set()
        self._stored = False
        self._silence = ""

    async def run(self, wait_s: float | None) -> RolloutEnd:
        """Deploys, and returns how it ended. Raises RyzansteinError if the deployment is refused."""
        async with self._place.client() as client:
            before = await client.look()
            stored = await client.deploy(self._deployment, reload=self._reload, rollback=self._rollback)
            self._rollout = Rollout(stored)
            self._stored = True
            _tell(f"{'rolling back' if self._rollback else 'deploying'} {stored.model!r} {self._from}{stored.path}")
            if ignored := self._ignored(stored):
                _tell(f"the orchestrator is an older one: it ignores {ignored}", style="yellow")
            if wait_s is None:
                return RolloutEnd(True, "not waiting; `ryzanstein deploy --list` shows which nodes are ready")
            return await self._wait(client, before, time.monotonic() + wait_s, wait_s)

    @property
    def _from(self) -> str:
        return "to " if self._rollback else "from "

    def _ignored(self, stored: Deployment) -> str:
        """Returns the options that an older orchestrator did not understand."""
        asked = self._deployment
        if not stored.revision and (self._reload or asked.idle_unload_s):
            return "--reload and --idle-unload"
        same = (stored.min_replicas, stored.max_replicas, stored.rollout) == (
            asked.min_replicas,
            asked.max_replicas,
            asked.rollout,
        )
        allowed_alone = asked.rollout == RolloutLimits(allow_outage=True) and not (asked.min_replicas or asked.max_replicas)
        return "" if same or allowed_alone or self._rollback else "the bounds of nodes and of how they change"

    def remedy(self, ending: RolloutEnd) -> str:
        """Returns how to end what is still in force."""
        if ending.earlier:
            back = ", or return to the earlier directory with --rollback" if self._rollout.deployment.earlier_path else ""
            return f"; repair it and deploy it with --reload{back}"
        return f"; it stays deployed until `ryzanstein deploy {self._deployment.model} --remove`" if ending.in_force else ""

    def interrupted(self) -> str:
        """Returns what an interruption leaves behind."""
        model = self._deployment.model
        if not self._stored:
            return f"interrupted before the answer; `ryzanstein deploy --list` shows whether {model!r} is deployed"
        return f"{model!r} stays deployed, ready on {self._rollout.count()}; `ryzanstein deploy {model} --remove` withdraws it"

    async def _wait(self, client: DeploymentClient, before: Assignments, deadline: float, wait_s: float) -> RolloutEnd:
        while True:
            look = await self._look(client)
            if look is not None:
                await self._see(look)
                self._warn(before)
                late = time.monotonic() >= deadline
                if (ending := self._rollout.ending(self._reasons, last=late)) is not None:
                    return ending
            if time.monotonic() >= deadline:
                state = self._silence or f"{self._rollout.count()}; {self._rollout.waiting_for()}"
                return RolloutEnd(False, f"{self._deployment.model!r} is not ready after {wait_s:g} s: {state}")
            await asyncio.sleep(_LOOK_EVERY_S)

    async def _look(self, client: DeploymentClient) -> Assignments | None:
        """Returns None while the orchestrator is away: it keeps its deployments over a restart."""
        try:
            look = await client.look()
        except RyzansteinError as error:
            if error.code not in (Code.UNAVAILABLE, Code.DEADLINE_EXCEEDED):
                raise
            if not self._silence:
                self._silence = f"the orchestrator at {self._place.orchestrator} does not answer"
                _tell(f"{self._silence}; still waiting")
            return None
        self._silence = ""
        return look

    async def _see(self, look: Assignments) -> None:
        view = look.deployments.get(self._deployment.model)
        if view is not None and view.waits_for != self._waits_for:
            self._waits_for = view.waits_for
            if view.waits_for:
                _tell(f"no further node changes: {view.waits_for}", style="yellow")
        for node_id, phase in self._rollout.see(look, time.monotonic()):
            why = ""
            if phase in (Phase.FAILED, Phase.REFUSED):
                self._reasons[node_id] = self._rollout.reason(node_id) or await reason_of(
                    look.nodes[node_id], self._place.dialer
                )
                why = f": {self._reasons[node_id]}"
            _tell(f"{node_id} {phase.value}{why}")

    def _warn(self, before: Assignments) -> None:
        for model in self._rollout.displaced(before.nodes):
            if model not in self._displaced:
                self._displaced.add(model)
                _tell(f"no other node serves {model!r}: requests for it will fail", style="yellow")


def _tell(line: str, style: str | None = None) -> None:
    display.people().print(line, style=style, markup=False, soft_wrap=True)
