"""The pages of recent conversations, and where each would go on: what a drain hands over."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ryzanstein.generation.request import NodePlace
from ryzanstein.worker.agent.pages.store import PageScope

MAX_KEYS = 2**18  # of all conversations together
MAX_CHAINS = 2**15


@dataclass(slots=True)
class Chain:
    """The pages of a conversation's newest turn, in order. `place`: the node to which they would go."""

    scope: PageScope
    place: NodePlace
    keys: list[bytes] = field(default_factory=list)


class Conversations:
    """The chains by conversation. The least recently used are forgotten when there are too many, or too many keys."""

    def __init__(self, max_keys: int = MAX_KEYS, max_chains: int = MAX_CHAINS) -> None:
        self._max_keys, self._max_chains = max_keys, max_chains
        self._chains: OrderedDict[bytes, Chain] = OrderedDict()
        self._num_keys = 0

    def begin(self, conversation: bytes, chain: Chain) -> None:
        """Begins a turn, which names its pages from the first one on."""
        if (old := self._chains.pop(conversation, None)) is not None:
            self._num_keys -= len(old.keys)
        self._chains[conversation] = chain
        if len(self._chains) > self._max_chains:
            self._forget_oldest()

    def add(self, conversation: bytes, keys: Sequence[bytes]) -> None:
        """Adds pages to the conversation's turn."""
        if (chain := self._chains.get(conversation)) is None:
            return
        chain.keys += keys
        self._num_keys += len(keys)
        while self._num_keys > self._max_keys:
            self._forget_oldest()

    def newest_first(self) -> Iterator[Chain]:
        yield from reversed(list(self._chains.values()))

    def _forget_oldest(self) -> None:
        _, forgotten = self._chains.popitem(last=False)
        self._num_keys -= len(forgotten.keys)

    def clear(self) -> None:
        self._chains.clear()
        self._num_keys = 0
