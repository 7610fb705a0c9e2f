"""Which service or operator calls: a role and a name, from the certificate of the connection.

A certificate has exactly one URI `spiffe://TRUST/ROLE/NAME`, which a server reads, and DNS names,
which a client demands of the server that it dials: of the role (`node.TRUST`), and of the name in it
(`NAME.node.TRUST`).
"""

from __future__ import annotations

import re
from contextvars import ContextVar
from dataclasses import dataclass
from enum import StrEnum
from hashlib import sha256
from typing import Any
from urllib.parse import quote, unquote

from ryzanstein.auth import refusals

DEFAULT_TRUST = "ryzanstein.internal"
MAX_PEER_CHARS = 128
_SCHEME = "spiffe://"
# What a DNS label may be as it stands. Other ids are replaced by a digest: labels have at most 63 characters.
_LABEL = re.compile(r"(?!x--)[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")
_TRUST = re.compile(r"[a-z0-9](?:[a-z0-9.-]{0,126}[a-z0-9])?")


class PeerRole(StrEnum):
    """What a peer is. A role never implies another one."""

    NODE = "node"
    ROUTER = "router"
    ORCHESTRATOR = "orchestrator"
    OPERATOR = "operator"
    MONITOR = "monitor"


SERVERS = frozenset({PeerRole.NODE, PeerRole.ROUTER, PeerRole.ORCHESTRATOR})
"""The roles that others dial; the rest only call."""


@dataclass(frozen=True, slots=True)
class Peer:
    """An identity. `name` is the id of a node or router, or an operator's or monitor's name; the orchestrator has none."""

    role: PeerRole
    name: str = ""

    def __str__(self) -> str:
        return f"{self.role}/{self.name}" if self.name else self.role.value

    def uri(self, trust: str) -> str:
        """Returns the URI in this peer's certificate."""
        return f"{_SCHEME}{trust}/{self.role}" + (f"/{quote(self.name, safe='')}" if self.name else "")

    def server_name(self, trust: str) -> str:
        """Returns the DNS name that a client demands which dials this peer; without a name, one that all of its role have."""
        return f"{_label(self.name)}.{self.role}.{trust}" if self.name else f"{self.role}.{trust}"

    def dns_names(self, trust: str) -> list[str]:
        """Returns the DNS names in this peer's certificate; none for who is not dialled."""
        if self.role not in SERVERS:
            return []
        return list(dict.fromkeys([self.server_name(trust), Peer(self.role).server_name(trust)]))


Expect = Peer
"""Whom a client means to reach. Without a name: any peer of the role."""


def checked_trust(trust: str) -> str:
    """Returns the trust domain. Raises ValueError if it is not one: a DNS name in lower case."""
    if not _TRUST.fullmatch(trust):
        raise ValueError("must be a DNS name in lower case, such as ryzanstein.internal")
    return trust


def checked_peer(role: PeerRole, name: str) -> Peer:
    """Returns a peer. Raises ValueError for a name that no certificate can have."""
    if role is PeerRole.ORCHESTRATOR:
        return Peer(role)
    if not 0 < len(name) <= MAX_PEER_CHARS or not name.isprintable():
        raise ValueError(f"a name must have 1 to {MAX_PEER_CHARS} printable characters")
    return Peer(role, name)


def read_uri(uri: str, trust: str) -> Peer | None:
    """Returns the peer that a URI names; None if it is none of this trust domain."""
    role, _, name = uri.removeprefix(f"{_SCHEME}{trust}/").partition("/")
    try:
        peer = checked_peer(PeerRole(role), unquote(name, errors="strict"))
    except ValueError:
        return None
    return peer if peer.uri(trust) == uri else None


def peer_in(auth: dict[str, Any], trust: str) -> Peer | None:
    """Returns the peer of a call's `auth_context()`; None without a certificate, or with one that is not of a peer.

    The connection's handshake has verified the certificate.
    """
    uris = [bytes(uri).decode("latin-1") for uri in auth.get("peer_uri", ())]
    return read_uri(uris[0], trust) if len(uris) == 1 else None


PEER: ContextVar[Peer | None] = ContextVar("peer", default=None)
"""The peer of the call that runs; None without TLS. The server sets it after the peer was admitted."""


def check_name(name: str) -> None:
    """Raises PERMISSION_DENIED NOT_YOUR_NAME if the peer that calls has a certificate of another name."""
    peer = PEER.get()
    if peer is not None and peer.name != name:
        raise refusals.not_your_name(name, str(peer))


def _label(name: str) -> str:
    return name if _LABEL.fullmatch(name) else f"x--{sha256(name.encode()).hexdigest()[:40]}"
