"""The certificates of a gRPC port, as they are at each handshake."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Generic

import grpc

from ryzanstein.auth.certificates.live import LiveCertificates, T


class PortCertificates(Generic[T]):
    """The certificates of one port. gRPC asks for new ones at each handshake, in threads of its own.

    `configured` returns a set as gRPC wants it. `asks_clients`: only clients with a certificate of the set's CAs connect.
    """

    def __init__(
        self, live: LiveCertificates[T], configured: Callable[[T], grpc.ServerCertificateConfiguration], *, asks_clients: bool
    ) -> None:
        # gRPC frees what it is given: each configuration is handed out once.
        self._new: deque[grpc.ServerCertificateConfiguration] = deque(maxlen=1)
        self._configured = configured
        first = configured(live.current)
        fetch: Any = self._fetch  # its type lacks None: no change
        self.credentials = grpc.dynamic_ssl_server_credentials(first, fetch, require_client_authentication=asks_clients)
        live.observe(self._changed)

    def _changed(self, new: T) -> None:
        self._new.append(self._configured(new))

    def _fetch(self) -> grpc.ServerCertificateConfiguration | None:
        try:
            return self._new.pop()
        except IndexError:
            return None
