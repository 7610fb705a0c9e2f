"""The certificates of a gRPC port, as they are at each handshake: for the library's server and for the builtin one."""

from __future__ import annotations

import ssl
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, NamedTuple

import grpc
import structlog

from ryzanstein.auth.certificates.live import LiveCertificates, T
from ryzanstein.rpc.tls.server_context import server_context

log = structlog.get_logger(__name__)


class ShownCertificate(NamedTuple):
    """What a port shows, in PEM form, and the CAs of the clients that it takes; empty: it asks clients for nothing."""

    chain: bytes
    key: bytes
    roots: bytes = b""


class PortCertificates(Generic[T]):
    """The certificates of one port. `shown` returns what it shows of a set."""

    def __init__(self, live: LiveCertificates[T], shown: Callable[[T], ShownCertificate]) -> None:
        self._live, self._shown = live, shown
        self._context: ssl.SSLContext | None = None
        self._version = 0
        # gRPC frees what it is given: each configuration is handed out once.
        self._new: deque[grpc.ServerCertificateConfiguration] = deque(maxlen=1)

    def credentials(self) -> grpc.ServerCredentials:
        """Returns the credentials of a port of the library, which asks for new ones at each handshake in its threads."""
        shown = self._shown(self._live.current)
        self._live.observe(lambda new: self._new.append(_configuration(self._shown(new))))
        fetch: Any = self._fetch  # its type lacks None: no change
        asks_clients = bool(shown.roots)
        return grpc.dynamic_ssl_server_credentials(_configuration(shown), fetch, require_client_authentication=asks_clients)

    def context(self) -> ssl.SSLContext:
        """Returns the context of a handshake that begins now. Raises OSError for certificates that cannot be used."""
        if self._context is None or self._version != self._live.version:
            try:
                self._context, self._version = server_context(*self._shown(self._live.current)), self._live.version
            except OSError as error:  # OpenSSL's are of this kind
                log.error("certificates cannot be used, handshakes fail", error=str(error))
                raise
        return self._context

    def _fetch(self) -> grpc.ServerCertificateConfiguration | None:
        try:
            return self._new.pop()
        except IndexError:
            return None


def _configuration(shown: ShownCertificate) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(shown.key, shown.chain)], shown.roots or None)
