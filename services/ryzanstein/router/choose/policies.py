"""The policies by name, and which one a model has.

The prefix policy: a request goes to the node that recently got the longest common beginning.

If this router has not placed the beginning, the hash of the beginning decides; it gives the same
node on every router. A miss is thus spread like any other key, and is usually not a miss on the
node. The index holds only this router's own placements, a bounded number of them. It guarantees
nothing: a wrong entry costs a recomputation.

Beginnings are known by digests, at lengths that double. A prompt of a million characters has a dozen.
Lengths count from the end of the system prompt, but the digests cover it too: prompts that share only a
system prompt share no mark, however long it is.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import chain, takewhile
from typing import Annotated, Literal

from pydantic import Field

from ryzanstein.bounds import PositiveSize, Size
from ryzanstein.generation.prompts import ChatPrompt, Message, Prompt, Role, TextPrompt, TokenPrompt
from ryzanstein.generation.request import GenerationRequest
from ryzanstein.router.choose.affinity import Affinity, beginning, scope_key
from ryzanstein.router.choose.members import NodeGroup
from ryzanstein.router.choose.policy import (
    AnyLimit,
    LeastLoaded,
    Limit,
    Policy,
    QueueLimit,
    RecentLimit,
    RoundRobin,
    Sticky,
)

# About 64 tokens, four blocks of a typical KV cache. A shorter match is not worth a preference.
FIRST_MARK_BYTES = 256


def marks(prompt: Prompt, scope: bytes = b"") -> tuple[bytes, ...]:
    """Returns digests of 16 bytes, the shortest beginning first. `scope`: see `scope_key`.

    Empty when fewer than `FIRST_MARK_BYTES` follow the system prompt.
    """
    instructions, rest = _parts(prompt)
    digest = blake2b(instructions, digest_size=16, key=scope)
    digest.update(len(instructions).to_bytes(8, "big"))
    found, begin = [], 0
    for end in _lengths(len(rest)):
        digest.update(rest[begin:end])
        found.append(digest.digest())
        begin = end
    return tuple(found)


def _lengths(available: int) -> Iterator[int]:
    return takewhile(lambda length: length <= available, (FIRST_MARK_BYTES << doubling for doubling in range(64)))


def _parts(prompt: Prompt) -> tuple[bytes, bytes]:
    """Returns the system prompt, and everything after it."""
    match prompt:
        case ChatPrompt(messages):
            system = list(takewhile(lambda message: message.role is Role.SYSTEM, messages))
            # No length prefixes: a document followed by a different question must begin alike.
            texts = [f"{message.role.value}\x1f{message.content}{_parts_of(message)}\x1e" for message in messages]
            offered = "".join(f"{tool.name}\x1f{tool.description}\x1f{tool.parameters}\x1e" for tool in prompt.tools.offered)
            return (offered + "".join(texts[: len(system)])).encode(), "".join(texts[len(system) :]).encode()
        case TextPrompt(text):
            return b"", b"text:" + text.encode()
        case TokenPrompt(token_ids):
            return b"", b"tokens:" + b"".join(token.to_bytes(4, "big") for token in token_ids)


def _parts_of(message: Message) -> str:
    return "".join(f"\x1f{call.name}\x1f{call.arguments}" for call in message.tool_calls)


class PrefixIndex:
    """Maps each beginning to the node that got it last.

    Above `max_entries` (about 200 bytes each) it evicts the least recently placed entries.
    """

    def __init__(self, max_entries: int) -> None:
        self._max_entries = max_entries
        self._nodes: OrderedDict[bytes, str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._nodes)

    def put(self, marks: Sequence[bytes], node_id: str) -> None:
        for mark in marks:
            self._nodes[mark] = node_id
            self._nodes.move_to_end(mark)
        while len(self._nodes) > self._max_entries:
            self._nodes.popitem(last=False)

    def find(self, marks: Sequence[bytes]) -> Iterator[str]:
        """Returns the nodes that got a beginning of the prompt, longest first, each node once."""
        found = dict.fromkeys(self._nodes[mark] for mark in reversed(marks) if mark in self._nodes)
        return iter(found)


class Prefix:
    """Orders by the longest beginning that a node recently got, then by the order of the key."""

    keyed = True
    homing = False

    def __init__(self, name: str, limit: Limit, max_entries: int) -> None:
        self.name = name
        self.limit = limit
        self._index = PrefixIndex(max_entries)

    def affinity_of(self, request: GenerationRequest) -> Affinity:
        return Affinity(beginning(request), True, marks(request.prompt, scope_key(request)))

    def order(self, affinity: Affinity, nodes: NodeGroup, node_ids: Set[str]) -> Iterator[str]:
        found = [node_id for node_id in self._index.find(affinity.marks) if node_id in node_ids]
        return chain(found, (node_id for node_id in nodes.order(affinity.key, node_ids) if node_id not in found))

    def placed(self, affinity: Affinity, node_id: str) -> None:
        self._index.put(affinity.marks, node_id)


# The names used in settings, metrics and logs.
PolicyName = Literal["affinity", "bounded", "weighted", "prefix", "least_loaded", "round_robin"]


@dataclass(frozen=True, slots=True)
class PolicyBounds:
    """The bounds of the policies."""

    queue_bound: Size = 32
    """Sequences that may wait on a session's node before another is preferred."""
    load_bound: Annotated[float, Field(ge=1.01, le=2)] = 1.04
    """Multiple of its fair share within the window at which a node is too full."""
    bound_floor: PositiveSize = 16
    """Requests within the window below which a node is never too full."""
    prefix_entries: Annotated[int, Field(ge=1, le=10_000_000)] = 65_536
    """Beginnings of prompts that the prefix policy remembers per model."""


@dataclass(frozen=True, slots=True)
class PolicyChoice:
    """The `default` policy, and exceptions for named models.

    `first_turn` is where round robin begins; it differs between routers.
    """

    default: PolicyName = "affinity"
    by_model: Mapping[str, PolicyName] = field(default_factory=dict)
    bounds: PolicyBounds = field(default_factory=PolicyBounds)
    first_turn: int = 0

    def name(self, model: str) -> PolicyName:
        return self.by_model.get(model, self.default)

    def make(self, name: PolicyName) -> Policy:
        """Returns a new policy. If it has state, the state is its own."""
        queue = QueueLimit(self.bounds.queue_bound)
        recent = RecentLimit(self.bounds.load_bound, self.bounds.bound_floor)
        match name:
            case "affinity":
                return Sticky(name, queue)
            case "bounded":
                return Sticky(name, AnyLimit((queue, recent)), homing=True)
            case "weighted":
                return Sticky(name, queue, weighted=True)
            case "prefix":
                # A node that has the beginning is preferred, but a request does not wait for it.
                return Prefix(name, AnyLimit((QueueLimit(queue_bound=0), recent)), self.bounds.prefix_entries)
            case "least_loaded":
                return LeastLoaded(name)
            case "round_robin":
                return RoundRobin(name, self.first_turn)
