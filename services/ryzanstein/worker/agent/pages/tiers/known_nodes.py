"""Which addresses a node dials to send pages to other nodes, or to fetch theirs.

The addresses come with requests, from routers. A node of a cluster dials only the addresses that the
orchestrator has for its nodes. One without an orchestrator, or with one of an earlier version, has
only its routers to go by: it then refuses what is no host:port, and IP addresses that no node has. Open
remains that such a router may name any other host, or a name that leads anywhere.
"""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from ipaddress import IPv4Address, IPv6Address, ip_address

from ryzanstein.addresses import split_address
from ryzanstein.cluster import MemberAddresses
from ryzanstein.worker.agent.pages.store import StoreFailed

_LEARN_S = 0.5  # a node that just joined is known after the next beat; less than a fetch may take at least
_KEPT_S = 60.0  # after the orchestrator no longer names an address: it may have just restarted, or the node
_BEATS_APART_S = 0.1
_REST_S = 10.0
# No label that inet_aton would read as a number at the end: there are many ways to write 169.254.169.254.
_NAME = re.compile(r"(?:[A-Za-z0-9_-]{1,63}\.)*(?=[^.]*[A-Za-z])(?!0[xX])[A-Za-z0-9_-]{1,63}\.?")
# To gRPC "unix:50061" is a path: it looks for a scheme before it looks for a host.
_SCHEMES = frozenset({"dns", "ipv4", "ipv6", "unix", "unix-abstract", "vsock", "xds", "google-c2p", "passthrough"})
_BROADCAST = IPv4Address("255.255.255.255")


class KnownNodes:
    """The addresses that the orchestrator named. `refused` is called with the cause when another one is not dialled."""

    def __init__(self, refused: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._refused, self._clock = refused, clock
        self._until: dict[str, float] = {}
        self._learned, self._asked = asyncio.Event(), asyncio.Event()
        self._asked_s = -math.inf
        self.digest = b""
        """What the orchestrator calls the addresses that it named last; empty: it has named none."""

    def __contains__(self, address: str) -> bool:
        return self._until.get(address, 0.0) > self._clock()

    def follow(self, members: MemberAddresses) -> None:
        """Takes the addresses of all nodes, or what changed. Those that are no longer among them are known for a minute.

        Ignores the change of other addresses than those that it was told last: the next beat says which these are.
        """
        if members.since and members.since != self.digest:
            return
        now = self._clock()
        gone = members.removed if members.since else self._until
        going = {address: min(self._until.get(address, 0.0), now + _KEPT_S) for address in gone}
        known = {**self._until, **going, **dict.fromkeys(members.addresses, math.inf)}
        self._until = {address: until for address, until in known.items() if until > now}
        self.digest = members.digest
        self._learned.set()

    async def check(self, address: str) -> None:
        """Returns if the address may be dialled: at once, or when the orchestrator has named it. Raises StoreFailed."""
        if not may_be_dialled(address):
            raise self._refusal("address")
        if not self.digest or address in self:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(_LEARN_S):
                while address not in self:
                    self._learned.clear()
                    self._ask()
                    await self._learned.wait()
        if address not in self:
            raise self._refusal("not_member")

    async def asked(self, timeout_s: float) -> None:
        """Returns when somebody waits for an address to be known, or after the time; not sooner than after 0.1 s."""
        asked, soon_s = self._asked, min(_BEATS_APART_S, timeout_s)
        await asyncio.sleep(soon_s)
        if time.monotonic() - self._asked_s < 2 * _BEATS_APART_S:  # also just before this call
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s - soon_s):
                await asked.wait()

    def _ask(self) -> None:
        """Ends the calls of `asked`, of which an earlier stream's may wait beside the one that counts."""
        self._asked.set()
        self._asked, self._asked_s = asyncio.Event(), time.monotonic()

    def _refusal(self, cause: str) -> StoreFailed:
        self._refused(cause)
        return StoreFailed("unknown_node", _REST_S)


def may_be_dialled(address: str) -> bool:
    """Returns whether this is host:port, and not of a host that no node has."""
    try:
        host, _ = split_address(address)
    except ValueError:
        return False
    try:
        return not any(map(_is_no_node, _forms(ip_address(host))))
    except ValueError:
        return _NAME.fullmatch(host) is not None and host.lower() not in _SCHEMES


def _forms(ip: IPv4Address | IPv6Address) -> Iterable[IPv4Address | IPv6Address]:
    """Returns an address, and those of IPv4 that it stands for."""
    inner = (ip.ipv4_mapped, ip.sixtofour) if isinstance(ip, IPv6Address) else ()
    return (ip, *(each for each in inner if each is not None))


def _is_no_node(ip: IPv4Address | IPv6Address) -> bool:
    return ip.is_link_local or ip.is_unspecified or ip.is_multicast or ip == _BROADCAST
