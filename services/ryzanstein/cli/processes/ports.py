"""Free loopback ports.

A port is free when it is returned and may be taken a moment later: callers retry.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from contextlib import ExitStack

import psutil

from ryzanstein.process.process_start import lacks

_LISTED_CHARS = 80


class InUseError(Exception):
    """A port or directory, or the machine, cannot be used. The message is a sentence for people."""


def require_able() -> None:
    """Raises InUseError if services cannot run on this machine, or with this interpreter."""
    for lack in lacks(ranks=True):
        raise InUseError(lack)


def free_ports(count: int) -> list[int]:
    """Returns `count` different ports of 127.0.0.1 that are not in use now."""
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def require_free(ports: Mapping[int, str]) -> None:
    """Raises InUseError for the first of `ports` of 127.0.0.1 that is taken.

    The values of `ports` are the options that chose them. The error names the option and who holds
    the port.
    """
    for port, option in ports.items():
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do: one that just ended does not block
            try:
                probe.bind(("127.0.0.1", port))
            except PermissionError:
                raise InUseError(f"port {port} ({option}) requires privileges; choose one above 1023") from None
            except OSError as error:
                why = f"is taken{_holder(port)}" if "in use" in str(error) else f"cannot be bound: {error.strerror}"
                raise InUseError(f"port {port} of 127.0.0.1 {why}; choose another with {option}, or 0") from None


def _holder(port: int) -> str:
    """Returns who listens there, as far as this user may see."""
    try:
        listening = [each for each in psutil.net_connections(kind="tcp") if each.status == psutil.CONN_LISTEN]
        pid = next((each.pid for each in listening if each.pid and each.laddr and each.laddr.port == port), None)
        return "" if pid is None else f" by process {pid} ({' '.join(psutil.Process(pid).cmdline())[:_LISTED_CHARS]})"
    except (psutil.Error, OSError):
        return ""
