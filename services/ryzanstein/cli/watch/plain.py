"""A watch without a screen: one line for each change, with its time, until the reader or a signal ends it."""

from __future__ import annotations

import json
import os
import re
import select
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import chain

from ryzanstein.cli.status.status_tables import losses_of, state_of
from ryzanstein.client.cleaning import clean
from ryzanstein.survey.problems import problems
from ryzanstein.survey.views import ClusterStatus

Fact = tuple[str, str, str]
"""Which kind of thing it is of, which one, and what of it."""
Facts = Mapping[Fact, str]
_SPAN = re.compile(r"\b\d+(\.\d+)? (s|hours)\b")


@dataclass(frozen=True, slots=True)
class ObservedChange:
    """A change between two samples. `before` None: it is new, `after` None: it is over."""

    time: str
    kind: str
    name: str
    what: str
    before: str | None
    after: str | None

    @property
    def line(self) -> str:
        subject = " ".join(filter(None, (self.time, "", self.kind, self.name, self.what))).replace(" ", "  ", 1)
        if self.after is None:
            return f"{subject}: over" if not self.before else f"{subject}: {self.before} -> gone"
        return subject + (f": {self.before} -> {self.after}" if self.before else f": {self.after}" if self.after else "")

    @property
    def document(self) -> str:
        return json.dumps(asdict(self))


def facts_of(status: ClusterStatus) -> dict[Fact, str]:
    """Returns what holds in a cluster, without what changes with each request: loads, steps and times."""
    found: dict[Fact, str] = {}
    for kind, name, what, value in chain(_services(status), _nodes(status), _links(status), _losses(status)):
        found[kind, _one_line(name), what] = _one_line(value)
    for problem in problems(status):
        found["problem", _SPAN.sub("some time", _one_line(problem)), ""] = ""
    return found


def _services(status: ClusterStatus) -> Iterator[tuple[str, str, str, str]]:
    for service in ("orchestrator", "router"):
        yield "service", service, "", "no answer" if service in status.errors else "answers"
    for model in status.models:
        yield "model", model.name, "ready nodes", str(model.ready_nodes)


def _nodes(status: ClusterStatus) -> Iterator[tuple[str, str, str, str]]:
    for each in status.nodes:
        name = each.node.node_id
        yield "node", name, "state", state_of(each)
        if each.node.model:
            yield "node", name, "model", each.node.model
        if not each.error:
            yield "node", name, "restarts of ranks", str(each.rank_restarts)


def _links(status: ClusterStatus) -> Iterator[tuple[str, str, str, str]]:
    for link in status.router.links:
        name = link.node_id or link.address
        yield "link", name, "", "up" if link.up else "down"
        yield "link", name, "breaker", link.breaker
        yield "link", name, "suspected", link.suspicion or "no"


def _losses(status: ClusterStatus) -> Iterator[tuple[str, str, str, str]]:
    for at, seen_by, what, cause, details in losses_of(status):
        when = datetime.fromtimestamp(at, UTC).strftime("%H:%M:%SZ")
        yield "loss", f"{what} at {when}", f"seen by {_one_line(seen_by)}", ", ".join(filter(None, (cause, details)))


def _one_line(text: str) -> str:
    return " ".join(clean(text).split())


def changes(before: Facts, after: Facts, time: str) -> Iterator[ObservedChange]:
    """Yields what is new, other or over."""
    for key in [*after, *(key for key in before if key not in after)]:
        old, new = before.get(key), after.get(key)
        if old != new:
            yield ObservedChange(time, *key, old, new)


def still_told(before: Facts, after: Facts, status: ClusterStatus) -> dict[Fact, str]:
    """Returns what is not over although nobody says it: who said it is silent."""
    silent = {_one_line(each.node.node_id) for each in status.nodes if each.error}
    router, members = "router" in status.errors, "orchestrator" in status.errors

    def kept(kind: str, name: str, what: str) -> bool:
        if kind in ("model", "link"):
            return router
        if kind == "node":
            return members or name in silent
        return kind == "loss" and (router or what.removeprefix("seen by ") in silent)

    return {key: value for key, value in before.items() if key not in after and kept(*key)}


class PlainWatch:
    """Prints the changes of one sample after another on standard output."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json
        self._facts: dict[Fact, str] = {}

    def take(self, status: ClusterStatus, now: float) -> None:
        """Prints what changed since the last sample; of the first one everything. Raises BrokenPipeError if nobody reads."""
        time = datetime.fromtimestamp(now, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        after = facts_of(status)
        after |= still_told(self._facts, after, status)
        for change in changes(self._facts, after, time):
            print(change.document if self._as_json else change.line)
        self._facts = after
        sys.stdout.flush()
        if _unread():
            raise BrokenPipeError


def _unread() -> bool:
    """Whether standard output is a pipe whose reader has left: who has nothing to write would not notice."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def discard_output() -> None:
    """Sends what standard output still holds nowhere: its reader has left."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
