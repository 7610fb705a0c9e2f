"""An attempt to run a generation on one node: the request, and what is generated so far."""

from __future__ import annotations

from dataclasses import dataclass

from ryzanstein.generation.request import GenerationRequest


@dataclass(frozen=True, slots=True)
class ChoiceProgress:
    """What one choice has generated so far. `finished` choices must not run again."""

    token_ids: tuple[int, ...] = ()
    finished: bool = False


@dataclass(frozen=True, slots=True)
class NodePlace:
    """A node, and where it is reached: host:port."""

    node_id: str
    address: str


@dataclass(frozen=True, slots=True)
class Attempt:
    """An attempt to run a generation on one node.

    `attempt` is a fencing number. `generated` has one entry per choice. `accepted_before`: an
    earlier node had accepted the generation. `backup`: where it goes next if the node fails.
    `previous`: a node that may have pages of the conversation's earlier turns. `conversation` is the
    same for all its turns; empty outside of one.
    """

    generation_id: str
    attempt: int
    request: GenerationRequest
    generated: tuple[ChoiceProgress, ...]
    accepted_before: bool = False
    backup: NodePlace | None = None
    previous: NodePlace | None = None
    conversation: bytes = b""
