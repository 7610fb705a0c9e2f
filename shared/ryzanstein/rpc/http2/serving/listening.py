"""The sockets of a server's address, as gRPC's own server would bind them."""

from __future__ import annotations

import socket
from contextlib import suppress

from ryzanstein.addresses import EVERY_HOST


def bound_sockets(host: str, port: int, *, shares_port: bool = False) -> list[socket.socket]:
    """Returns sockets that are bound to host:port and do not listen yet, one for each address of the host.

    With port 0 they have the same free port. A host that stands for all addresses has one socket for IPv4 and IPv6. If it
    `shares_port`, other processes may listen there too. Raises OSError.
    """
    if host in EVERY_HOST and (both := _for_all(port, shares_port)) is not None:
        return [both]
    sockets: list[socket.socket] = []
    try:
        for family, _, _, _, where in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE):
            if not sockets:
                sockets.append(_bound(family, (where[0], port), shares_port))
                continue
            with suppress(OSError):  # a host may have an address that this machine has not
                sockets.append(_bound(family, (where[0], sockets[0].getsockname()[1]), shares_port))
    except socket.gaierror as error:
        raise OSError(error.errno, error.strerror) from None
    return sockets


def _for_all(port: int, shares_port: bool) -> socket.socket | None:
    """Returns a socket for every address of this machine; None where there is no IPv6."""
    try:
        probe = socket.socket(socket.AF_INET6, socket.SOCK_STREAM)
        probe.close()
    except OSError:
        return None
    return _bound(socket.AF_INET6, ("::", port), shares_port)


def _bound(family: int, where: tuple[str | int, int], shares_port: bool) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shares_port:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(where[0] != "::"))
        sock.setblocking(False)
        sock.bind(where)
        sock.listen(1)  # a port that another process listens on is found now, not at the start
    except OSError:
        sock.close()
        raise
    return sock
