"""A router of several processes, which share its public ports, its files and its limits.

The kernel spreads connections over them (SO_REUSEPORT). Each is a router of its own for all others: it has its own links, its
own address for other routers and its own metrics. A client that comes back is served by any of them.
"""

from __future__ import annotations

import errno
import math
import os
import socket
from collections.abc import Callable
from contextlib import ExitStack, suppress

import structlog

from ryzanstein.addresses import join_address, split_address
from ryzanstein.observe import log as logs
from ryzanstein.process.service_process import FAILED
from ryzanstein.router.config import RouterSettings
from ryzanstein.router.processes.siblings import Heart, Patience, Siblings

log = structlog.get_logger(__name__)

# What all processes may have together.
_SHARED = (
    "grpc_max_calls",
    "http_max_arriving_bytes",
    "http_max_leaving_bytes",
    "http_max_connections",
    "websocket_max_connections",
    "max_running",
    "max_waiting",
    "max_held_prompt_bytes",
    "max_retained_tokens",
)
_OWN_PORTS = ("metrics_port", "health_port", "peer_port", "tls_port")
_STOP_S = 10.0  # beyond the grace of what runs

Run = Callable[[RouterSettings, Heart], int]
"""Runs one process with its settings, and returns its exit code."""


def run_processes(settings: RouterSettings, run: Run) -> int:
    """Runs the processes of a router until SIGTERM or SIGINT. Returns the exit code, also in each of them."""
    logs.setup("router", settings.log_level)
    with ExitStack() as held:
        ports = {"grpc_port": settings.grpc_port} | ({"http_port": settings.http_port} if settings.http else {})
        try:
            taken = {name: _reserved(held, settings.host, port) for name, port in ports.items()}
        except OSError as error:
            log.error("cannot serve", error=str(error))
            return FAILED
        settings = settings.model_copy(update=taken)

        def run_one(heart: Heart) -> int:
            held.close()
            return run(of_process(settings, heart.number), heart)

        patience = Patience(stop_s=settings.drain_grace_s + _STOP_S)
        return Siblings(settings.processes, run_one, patience).watch()


def of_process(settings: RouterSettings, number: int) -> RouterSettings:
    """Returns the settings of one process: its part of the limits, and a directory and ports of its own.

    The public HTTP port does not show metrics: they would be those of any one process.
    """
    count = settings.processes
    own: dict[str, object] = {name: max(1, math.ceil(getattr(settings, name) / count)) for name in _SHARED}
    own |= {name: port + number for name in _OWN_PORTS if (port := getattr(settings, name))}
    own |= {
        "router_address": _own_address(settings, number),
        "router_id": f"{settings.router_id}-{number}" if settings.router_id else f"{socket.gethostname()}-{os.getpid()}",
        "state_dir": settings.state_dir / f"process-{number}",
        "session_dir": settings.session_dir or settings.state_dir,
        "http_metrics": False,
    }
    return settings.model_copy(update=own)


def _own_address(settings: RouterSettings, number: int) -> str:
    """Returns where other routers reach a process: a port that is not the public one is the first process's."""
    with suppress(ValueError):
        host, port = split_address(settings.router_address)
        if port != settings.grpc_port:
            return join_address(host, port + number)
    return settings.router_address


def _reserved(held: ExitStack, host: str, port: int) -> int:
    """Holds a port for the processes, and returns its number. It takes no connections.

    With SO_REUSEPORT another program could listen there too, and take some of the connections in silence: so it is first
    bound without.
    """
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    try:
        with socket.socket(family, kind) as alone:
            alone.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            alone.bind(address)
            port = alone.getsockname()[1]
        shared = held.enter_context(socket.socket(family, kind))
        shared.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        shared.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        shared.bind((address[0], port, *address[2:]))
    except OSError as error:
        why = os.strerror(error.errno or errno.EADDRINUSE)
        raise OSError(f"cannot listen on {join_address(host, port)}: {why}") from None
    return port
