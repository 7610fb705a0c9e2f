"""`python -P -m ryzanstein.console`: settings, the page's server, signals.

Exit codes: 0 stopped by SIGTERM or SIGINT, 1 it failed (port taken, a bug), 2 bad settings.
"""

from __future__ import annotations

if __name__ == "__main__":
    from ryzanstein.process.process_start import begin

    begin(ranks=False)

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import uuid
from collections.abc import Iterator
from functools import partial

import structlog
import uvicorn

from ryzanstein.addresses import join_address
from ryzanstein.auth.certificates.files import MaterialError
from ryzanstein.console.answers.hub import Hub
from ryzanstein.console.answers.restarts import RestartNotes
from ryzanstein.console.app import Console, build
from ryzanstein.console.cluster import ClusterWatch
from ryzanstein.console.config import ConsoleSettings
from ryzanstein.console.login import ClientMaker, Logins, PagePlaces, Person, person_of
from ryzanstein.console.telemetry import ConsoleTelemetry
from ryzanstein.console.wire import MOST_BYTES, Welcome
from ryzanstein.observe.metrics import MetricsServer
from ryzanstein.process.awake import AwakeClock
from ryzanstein.process.background import STOP
from ryzanstein.process.service_process import BadSettingsError, read_settings, run_service
from ryzanstein.rpc.client import PLAIN, Dialer
from ryzanstein.rpc.server import terminated
from ryzanstein.survey.reach import KeyedRouter, RouterTrust

log = structlog.get_logger(__name__)

_SWEEP_S = 60.0
_MOST_CONNECTIONS = 256
_BACKLOG = 128
_FAREWELL_S = 2
"""How long requests and tabs may take to end."""


class _PageServer(uvicorn.Server):
    """A uvicorn server without its signal handlers, which would take SIGTERM away from the console."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve(settings: ConsoleSettings, terminal: int) -> None:
    """Serves until SIGTERM or SIGINT. Raises OSError when it cannot start, BadSettingsError for files that cannot be used."""
    telemetry = ConsoleTelemetry()
    listener = _bind(settings)
    port = listener.getsockname()[1]
    urls = settings.urls(port)
    notes = RestartNotes(settings.notes(port))
    make_person = _People(settings, telemetry, notes).make
    # Where each person has a key, it is entered again after a restart: it is kept nowhere.
    logins = Logins(settings.idle_s, telemetry, notes=notes if settings.own_machine else None)
    if settings.own_machine:
        logins.restore(make_person(""))
    welcome = Welcome(uuid.uuid4().hex, settings.router)
    console = Console(
        logins,
        telemetry,
        welcome,
        make_person,
        by_link=settings.own_machine,
        cookie=f"ryzanstein-console-{port}",
        secure=settings.secure,
    )
    metrics = MetricsServer(telemetry.registry, "127.0.0.1", settings.metrics_port)
    server = _PageServer(_config(settings, build(console, PagePlaces.of(urls), telemetry)))
    background = telemetry.background
    background.watch_loop()
    clock = AwakeClock(telemetry.loop_lag.observe)
    serving = background.supervise("http", partial(server.serve, [listener]), STOP, finite=True)
    background.supervise("logins", partial(_sweep, logins), STOP)
    say_link = partial(_say_link, settings, urls[0], logins, terminal)
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, say_link)
    log.info("serving", url=urls[0], port=port, metrics_port=metrics.port)
    say_link()
    try:
        await background.until(terminated())
    finally:
        await _stop(server, serving, logins, settings.drain_grace_s)
        clock.close()
        metrics.close()
        listener.close()
        await background.close()
    log.info("stopped")


async def _stop(server: uvicorn.Server, serving: asyncio.Task[None], logins: Logins, grace_s: float) -> None:
    """Lets answers go on for a while, with the page as it is; then closes tabs and leaves the cluster."""
    people = logins.people
    logins.write()
    await asyncio.gather(*(person.hub.close(grace_s) for person in people))
    for person in people:
        person.watch.close()
    server.config.timeout_graceful_shutdown = _FAREWELL_S
    server.should_exit = True
    await asyncio.gather(serving, return_exceptions=True)


async def _sweep(logins: Logins) -> None:
    """Logs out who does nothing."""
    while True:
        await asyncio.sleep(_SWEEP_S)
        for person in logins.idle():
            for leave in list(person.leave):
                leave()
            person.watch.close()
            await person.hub.close(0)


class _People:
    """Makes people of keys."""

    def __init__(self, settings: ConsoleSettings, telemetry: ConsoleTelemetry, notes: RestartNotes) -> None:
        """Raises BadSettingsError for files that cannot be used."""
        self._settings, self._telemetry, self._notes = settings, telemetry, notes
        try:
            self._own_key, self._roots = settings.key() if settings.own_machine else "", settings.roots()
            self._clients = ClientMaker(settings.router, self._roots, settings.insecure)
            self._clients.make(self._own_key)
            self._dialer = _dialer(settings)
        except (ValueError, MaterialError) as error:
            raise BadSettingsError(str(error)) from None

    def make(self, key: str) -> Person:
        """Returns who has this key; empty: the key of the process. Raises ValueError for a key that cannot be one."""
        name, key = person_of(key), key or self._own_key
        trust = None if self._roots is None else RouterTrust(self._roots)
        routers = [KeyedRouter(address, key, trust) for address in self._settings.routers]
        by_right = not self._settings.own_machine
        watch = ClusterWatch(self._settings.orchestrator, routers, self._dialer, self._telemetry, by_right=by_right)
        return Person(Hub(self._clients.make(key), self._telemetry, self._notes, name), watch)


def _dialer(settings: ConsoleSettings) -> Dialer:
    if settings.tls_dir is None:
        return PLAIN
    from ryzanstein.rpc.tls.service_tls import operator_dialer

    return operator_dialer(settings.tls_dir)


def _config(settings: ConsoleSettings, app: object) -> uvicorn.Config:
    # What the application fails with is logged once, as JSON.
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    return uvicorn.Config(
        app,  # type: ignore[arg-type]
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        http="h11",
        ws="websockets-sansio",
        ws_max_size=MOST_BYTES,
        ws_per_message_deflate=False,
        limit_concurrency=_MOST_CONNECTIONS,
        ssl_certfile=settings.tls_cert,
        ssl_keyfile=settings.tls_key,
    )


def _bind(settings: ConsoleSettings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((settings.host, settings.port))
        listener.listen(_BACKLOG)  # a browser that opens the link at once waits, and is not refused
    except OSError as error:
        listener.close()
        raise OSError(f"cannot listen on {join_address(settings.host, settings.port)}: {error.strerror}") from None
    return listener


def _say_link(settings: ConsoleSettings, url: str, logins: Logins, terminal: int) -> None:
    """Prints where the page is. A link logs in once, so it goes to the terminal and into no log."""
    base = settings.public_url or f"{url}/"
    link = f"{base}#t={logins.new_token()}" if settings.own_machine else base
    with contextlib.suppress(OSError):
        os.write(terminal, f"{link}\n".encode())


def main() -> int:
    """Runs the process and returns its exit code."""
    settings = read_settings(ConsoleSettings)
    terminal = os.dup(1)  # the log takes what is written to standard output
    return run_service("console", settings, partial(serve, terminal=terminal), (OSError,))


if __name__ == "__main__":
    sys.exit(main())
