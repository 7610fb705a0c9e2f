"""Which other routers there are, as routers say it. No IO: a driver asks, and tells what came.

A router says under which address it knows another one, which need not be one that a client reaches. So a router is learned
once it has answered there, as a member of the same cluster. Its transport must be as safe as that of the router that named it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ryzanstein.addresses import split_address
from ryzanstein.client.following.routers import RouterChoice
from ryzanstein.client.transport import is_local
from ryzanstein.errors import Code, RyzansteinError

if TYPE_CHECKING:  # the messages are loaded with the first question
    from ryzanstein.v1 import router_pb2 as pb

ASK_S = 2.0
"""How long a router may take to answer."""
_EVERY_S, _AFTER_FAILURE_S, _REFUSED_S = 60.0, 5.0, 3600.0
_MOST = 16
_REFUSALS = (Code.UNIMPLEMENTED, Code.PERMISSION_DENIED, Code.UNAUTHENTICATED)


class Learning:
    """Keeps the routers that are learned in a `RouterChoice`. All times are of one monotonic clock, in seconds."""

    def __init__(self, routers: RouterChoice, *, tls: bool, on: bool = True) -> None:
        """`tls`: the client speaks TLS."""
        self._routers, self._tls = routers, tls
        self._next_at = 0.0 if on else float("inf")
        self._instances: frozenset[str] = frozenset()

    def asks(self, now: float) -> bool:
        """Whether to ask a router now: not more often than once in a minute."""
        if now < self._next_at:
            return False
        self._next_at = now + _EVERY_S
        return True

    def failed(self, error: RyzansteinError, now: float) -> None:
        """A router did not say it. One of an earlier release cannot, and one may not want to."""
        self._next_at = now + (_REFUSED_S if error.code in _REFUSALS else _AFTER_FAILURE_S)

    def named(self, router: str, members: Sequence[pb.RouterMember]) -> list[str]:
        """A router named these. Returns which to ask whether they are reached. Those that it no longer names are forgotten."""
        found = [each for each in members if not each.draining and self._may_be_asked(router, each)][:_MOST]
        self._instances = frozenset(each.instance_id for each in found)
        addresses = [each.address for each in found]
        for address in self._routers.learned:
            if address not in addresses:
                self._routers.forget(address)
        return [each for each in addresses if each not in self._routers.addresses]

    def answered(self, address: str, members: Sequence[pb.RouterMember]) -> bool:
        """A router answered at this address. Returns whether it is learned: if it is of the cluster that was asked before."""
        is_member = any(each.address == address and each.instance_id in self._instances for each in members)
        if is_member:
            self._routers.learn(address)
        return is_member

    def _may_be_asked(self, router: str, member: pb.RouterMember) -> bool:
        try:
            split_address(member.address)
        except ValueError:  # of an earlier release, or nothing that gRPC should resolve
            return False
        if not member.instance_id or member.tls != self._tls:
            return False
        if is_local(member.address):
            return is_local(router)  # it is loopback of another machine
        return self._tls or not is_local(router)  # what stays on this machine must not leave it in the clear
