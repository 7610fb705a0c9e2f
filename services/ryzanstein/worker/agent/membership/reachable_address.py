"""The address at which routers reach the node."""

from __future__ import annotations

import asyncio
import socket

from ryzanstein.addresses import EVERY_HOST, host_of, join_address, with_port


class ReachableAddress:
    """The `advertised` address if there is one, else the listener's.

    A listener on every address is reached by the host's full name. Only `look_up` asks for it: a name
    server that is away may not answer for half a minute.
    """

    def __init__(self, advertised: str, host: str, port: int, tls_port: int = 0) -> None:
        self._port, self._tls_port = port, tls_port
        self._unnamed = not advertised and host in EVERY_HOST
        self.known = with_port(advertised, port) or join_address(socket.gethostname() if self._unnamed else host, port)

    @property
    def with_tls(self) -> str:
        """The address with TLS: the same host, at the port of that. Empty: there is none."""
        if self._tls_port == self._port:  # it is the only one, and may be advertised at another port
            return self.known
        return join_address(host_of(self.known), self._tls_port) if self._tls_port else ""

    async def look_up(self) -> None:
        """Finds the host's name once. Where it has no domain, perhaps because no name server answered, asks again."""
        if self._unnamed:
            name = await asyncio.to_thread(socket.getfqdn)
            self.known, self._unnamed = join_address(name, self._port), "." not in name
