"""Free loopback ports. A number is free when it is handed out and may be taken a moment later: whoever uses it retries."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from contextlib import ExitStack

import psutil

_SHOWN_CHARS = 80


class InUseError(Exception):
    """Something that is needed alone is not to be had; the message is a sentence for people."""


def free_ports(count: int) -> list[int]:
    """`count` different ports of 127.0.0.1 that nobody listens on now."""
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def require_free(ports: Mapping[int, str]) -> None:
    """`ports` of 127.0.0.1, each with the option that chose it. InUseError: the first that somebody has, and who that is."""
    for port, option in ports.items():
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do: who ended a moment ago is no obstacle
            try:
                probe.bind(("127.0.0.1", port))
            except PermissionError:
                raise InUseError(f"port {port} ({option}) is not permitted to this user; choose one above 1023") from None
            except OSError as error:
                why = f"is taken{_holder(port)}" if "in use" in str(error) else f"cannot be had: {error.strerror}"
                raise InUseError(f"port {port} of 127.0.0.1 {why}; choose another with {option}, or 0") from None


def _holder(port: int) -> str:
    """Who listens there, as far as this user may know."""
    try:
        listening = [each for each in psutil.net_connections(kind="tcp") if each.status == psutil.CONN_LISTEN]
        pid = next((each.pid for each in listening if each.pid and each.laddr and each.laddr.port == port), None)
        return "" if pid is None else f" by process {pid} ({' '.join(psutil.Process(pid).cmdline())[:_SHOWN_CHARS]})"
    except (psutil.Error, OSError):
        return ""
