"""What a person may change from a watch: whether a node drains. Each act names its consequence before it is done."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from ryzanstein.cli.rollout.drain import request_drain, withdraw_drain
from ryzanstein.cli.rollout.last_node import last_node, last_of
from ryzanstein.client.cleaning import clean
from ryzanstein.cluster import Node
from ryzanstein.errors import RyzansteinError
from ryzanstein.rpc.client import Dialer
from ryzanstein.survey.views import ClusterStatus

READ_ONLY = "this watch is read-only: nothing was changed"


class NodeAct(StrEnum):
    DRAIN = "drain"
    UNDRAIN = "undrain"


@dataclass(frozen=True, slots=True)
class Proposal:
    """An act that waits for a yes. `typed`: the node's id has to be typed, because nobody else serves what it serves."""

    act: NodeAct
    node_id: str
    consequence: str
    typed: bool = False

    @property
    def question(self) -> str:
        """What is asked, as a terminal may show it."""
        how = f"Type {self.node_id} to {self.act} it:" if self.typed else f"{self.act.capitalize()} {self.node_id}? (y/n)"
        return clean(f"{self.consequence}\n{how}" if self.typed else f"{how}\n{self.consequence}")

    def agreed(self, answer: str) -> bool:
        """Whether an answer is a yes: the node's id, where it has to be typed."""
        return answer.strip() == self.node_id if self.typed else answer.strip().casefold() in ("y", "yes")


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why an act cannot be done; one line."""

    why: str


def propose(act: NodeAct, node_id: str, status: ClusterStatus | None, *, read_only: bool) -> Proposal | Refusal:
    """Returns what an act would do, by what is known of the cluster, or why it cannot be done."""
    if read_only:
        return Refusal(READ_ONLY)
    if status is None or "orchestrator" in status.errors:
        return Refusal(f"the orchestrator does not answer: {act} needs it")
    nodes = {each.node.node_id: each.node for each in status.nodes if each.member and not each.further}
    if (node := nodes.get(node_id)) is None:
        return Refusal(_of_stranger(act, node_id))
    if node.drain_requested == (act is NodeAct.DRAIN):
        return Refusal(clean(f"{node_id} {'drains already' if node.drain_requested else 'does not drain'}"))
    if act is NodeAct.UNDRAIN:
        return Proposal(act, node_id, f"{node_id} takes work again.")
    last = last_of(nodes.values(), node_id)
    return Proposal(act, node_id, f"{last or _of_drain(node)}.", typed=last is not None)


def _of_stranger(act: NodeAct, node_id: str) -> str:
    if not node_id:
        return f"choose a row of a node to {act} it"
    return clean(f"{node_id} is not a member: `ryzanstein {act} --direct ADDRESS` asks the node itself")


def _of_drain(node: Node) -> str:
    loads = [report.load for report in node.models] if node.plural else [node.load]
    running, waiting = sum(load.running for load in loads), sum(load.waiting for load in loads)
    if not running + waiting:
        return f"{node.node_id} runs no generation; new ones go to other nodes"
    generations = f"{running} generation{'' if running == 1 else 's'}"
    queue = f", and {waiting} wait there" if waiting else ""
    return f"{node.node_id} runs {generations}{queue}, which it finishes; new ones go to other nodes"


class Operator:
    """Performs acts at an orchestrator, unless it is `read_only`."""

    def __init__(self, orchestrator: str, dialer: Dialer, *, read_only: bool) -> None:
        self._orchestrator, self._dialer, self._read_only = orchestrator, dialer, read_only

    async def perform(self, proposal: Proposal, answer: str) -> str | Proposal:
        """Performs an act and returns what became of it, one line.

        Returns another proposal if the node became the last one meanwhile: then its id has to be typed.
        """
        if self._read_only:
            return READ_ONLY
        if not proposal.agreed(answer):
            return "nothing was changed"
        node_id = proposal.node_id
        try:
            if proposal.act is NodeAct.UNDRAIN:
                await withdraw_drain(self._orchestrator, node_id, self._dialer)
                return clean(f"{node_id} takes work again")
            last = None if proposal.typed else await last_node(self._orchestrator, node_id, self._dialer)
            if last is not None:
                return Proposal(proposal.act, node_id, f"{last}.", typed=True)
            await request_drain(self._orchestrator, node_id, self._dialer)
            return clean(f"{node_id} is draining")
        except RyzansteinError as error:
            return clean(f"{proposal.act} failed, {error.reason or error.code.name}: {' '.join(error.message.split())}")
