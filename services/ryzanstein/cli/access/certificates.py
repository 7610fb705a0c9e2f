"""The certificates of a cluster on this machine: a CA of its own, and one for each service and for its operator."""

from __future__ import annotations

import time
from pathlib import Path

from ryzanstein.auth.peers.authority import Authority
from ryzanstein.auth.peers.peer import DEFAULT_TRUST, Peer, PeerRole
from ryzanstein.rpc.client import Dialer
from ryzanstein.rpc.tls.service_tls import operator_dialer

_RENEWED_S = 86_400.0
OPERATOR = Peer(PeerRole.OPERATOR, "local")


class LocalCertificates:
    """Certificates below a directory. The CA stays; the others are new at each start, and each day."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        if not (directory / "ca.key").exists():
            Authority.new(DEFAULT_TRUST).save(directory)
        self._authority = Authority.open(directory)
        self._folders: dict[str, Peer] = {}
        self._written_at = time.monotonic()
        self.operator = self.folder("operator", OPERATOR)

    def folder(self, name: str, peer: Peer) -> Path:
        """Writes the certificate of a peer, and returns its directory."""
        self._folders[name] = peer
        self._authority.write(peer, self._directory / name, renew=True)
        return self._directory / name

    def dialer(self) -> Dialer:
        """Returns how the operator dials the services."""
        return operator_dialer(self.operator)

    def keep(self, now: float) -> None:
        """Renews all of them once a day. `now` is monotonic seconds."""
        if now < self._written_at + _RENEWED_S:
            return
        self._written_at = now
        for name, peer in self._folders.items():
            self.folder(name, peer)
