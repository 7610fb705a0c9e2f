"""Where the members are reached, and what each node needs to hear of that.

A node knows the addresses by their digest, which is of what they are: any orchestrator can tell whether it knows the addresses
that a node was told last. Then it says what changed, which is a few bytes; else all of them. All addresses to all nodes at each
change would be N^2 bytes.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable
from hashlib import blake2b

from ryzanstein.cluster import MemberAddresses, Node, NodeReport

_FEW = 20
_TELL_S = 0.005  # between two messages of many addresses to one node, for each node: at 1,000 nodes 5 s
_SHORT = 16
_KEPT = 64  # earlier sets of addresses, of 33 KB each at 1,000 nodes


class AddressBook:
    """`nodes` returns the members. Call `changed` when one changed."""

    def __init__(self, nodes: Callable[[], Iterable[Node]]) -> None:
        self._nodes = nodes
        self._all: MemberAddresses | None = None
        self._lists: OrderedDict[bytes, frozenset[str]] = OrderedDict()
        self._changes: dict[bytes, MemberAddresses] = {}
        self._told: dict[str, float] = {}

    def changed(self) -> None:
        self._all = None

    def forget(self, node_id: str) -> None:
        """Forgets a node that is no member any more."""
        self._told.pop(node_id, None)

    def news(self, node_id: str, report: NodeReport, now: float) -> MemberAddresses | None:
        """Returns what a node should be told in the answer to this beat; None: nothing, or not yet. `now`: seconds.

        While many join, each node hears of them now and then, unless it is a short message.
        """
        known, everything = report.members_digest, self._everything()
        if known in (None, everything.digest):
            return None
        news = self._since(known) if known and report.takes_member_changes else everything
        if len(news.addresses) + len(news.removed) > _SHORT:
            if now - self._told.get(node_id, -math.inf) < (len(self._lists[everything.digest]) - _FEW) * _TELL_S:
                return None
            self._told[node_id] = now
        return news

    def _everything(self) -> MemberAddresses:
        if self._all is None:
            found = frozenset(each for node in self._nodes() for each in (node.address, node.tls_address) if each)
            addresses = tuple(sorted(found))
            digest = blake2b("\0".join(addresses).encode(), digest_size=8).digest()
            self._all = MemberAddresses(digest, addresses)
            if digest != next(reversed(self._lists), b""):
                self._lists[digest] = found
                self._lists.move_to_end(digest)
                self._changes.clear()
            if len(self._lists) > _KEPT:
                self._lists.popitem(last=False)
        return self._all

    def _since(self, known: bytes) -> MemberAddresses:
        """Returns what changed since the addresses of a digest: all of them, if these are not known or that is shorter."""
        everything = self._everything()
        if known not in self._lists:
            return everything
        if known not in self._changes:
            before, after = self._lists[known], self._lists[everything.digest]
            added, removed = tuple(sorted(after - before)), tuple(sorted(before - after))
            change = MemberAddresses(everything.digest, added, known, removed)
            self._changes[known] = change if len(added) + len(removed) < len(after) else everything
        return self._changes[known]
