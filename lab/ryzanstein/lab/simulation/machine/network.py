"""The network between simulated processes: paths, delays and the fate of connections.

Bytes of one direction of a connection arrive in order. A cut path loses nothing at first: what was
sent waits, as TCP resends it, and arrives when the path heals. Either side gives up a connection
whose peer answers nothing for the keepalive time. A process that ends resets its connections at
once; a machine that loses power sends nothing.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from ryzanstein.lab.simulation.machine.loop import SimulatedLoop
from ryzanstein.lab.simulation.machine.process import Process

CONNECT_TIMEOUT_S = 20.0
# The settings of our channels and servers: the time between pings and the time for an answer.
CLIENT_KEEPALIVE_S = (30.0, 10.0)
SERVER_KEEPALIVE_S = (60.0, 20.0)
_REPEAT_S = 0.2
_LONGEST_REPEAT_S = 3.0
_LOOK_S = 1.0


@dataclass(slots=True)
class Weather:
    """How long a packet takes, in seconds."""

    latency_s: float = 0.0002
    jitter_s: float = 0.0002
    spike_share: float = 0.0
    spike_s: float = 0.0


class Listener(Protocol):
    """A server at an address."""

    process: Process

    def accept(self, connection: SimulatedConnection) -> None: ...


class End(Protocol):
    """One side of a connection. It is notified when the connection is lost."""

    def connection_lost(self, why: str) -> None: ...


class SimulatedNetwork:
    """Addresses, paths and connections."""

    def __init__(self, loop: SimulatedLoop, rng: random.Random, weather: Weather) -> None:
        self.weather = weather
        self.loop = loop
        self._rng = rng
        self._listeners: dict[str, Listener] = {}
        self._cut: set[tuple[str, str]] = set()
        self._connections: dict[SimulatedConnection, None] = {}
        self.num_sent = 0
        """Messages so far, in both directions of all connections."""

    @property
    def connections(self) -> list[SimulatedConnection]:
        return list(self._connections)

    def listen(self, address: str, listener: Listener) -> None:
        """Listens at an address. Raises RuntimeError if the port is taken."""
        held = self._listeners.get(address)
        if held is not None and held.process.alive:
            raise RuntimeError(f"Failed to bind to address {address}")
        self._listeners[address] = listener

    def close(self, address: str, listener: Listener) -> None:
        if self._listeners.get(address) is listener:
            del self._listeners[address]

    def cut(self, source: str, target: str) -> None:
        """Stops everything that the machine `source` sends to `target`. One way."""
        self._cut.add((source, target))

    def heal(self, *pairs: tuple[str, str]) -> None:
        """Opens paths, each from a machine to another."""
        self._cut.difference_update(pairs)
        for connection in self.connections:
            connection.healed()

    def heal_all(self) -> None:
        self._cut.clear()
        for connection in self.connections:
            connection.healed()

    def reaches(self, source: str, target: str) -> bool:
        return (source, target) not in self._cut

    def delay_s(self) -> float:
        """Returns the delay of one packet."""
        weather = self.weather
        delay_s = weather.latency_s + weather.jitter_s * self._rng.random()
        if weather.spike_share and self._rng.random() < weather.spike_share:
            delay_s += weather.spike_s * self._rng.random()
        return delay_s

    def connect(
        self, client: Process, address: str, client_end: End, done: Callable[[SimulatedConnection | None], None]
    ) -> None:
        """Connects and calls `done` with the connection.

        Calls it with None if the connection was refused or timed out.
        """
        self._try(client, address, client_end, done, self.loop.now + CONNECT_TIMEOUT_S)

    def _try(
        self, client: Process, address: str, end: End, done: Callable[[SimulatedConnection | None], None], until: float
    ) -> None:
        host = address.rpartition(":")[0]
        source = client.machine.name
        if not (self.reaches(source, host) and self.reaches(host, source)):
            if self.loop.now >= until:
                done(None)
            else:
                client.call_later(_LOOK_S, self._try, client, address, end, done, until)
            return
        client.call_later(2 * self.delay_s(), self._arrive, client, address, end, done)

    def _arrive(self, client: Process, address: str, end: End, done: Callable[[SimulatedConnection | None], None]) -> None:
        listener = self._listeners.get(address)
        if listener is None or not listener.process.alive:
            done(None)
            return
        connection = SimulatedConnection(self, client, listener.process, end)
        self._connections[connection] = None
        listener.accept(connection)
        done(connection)

    def forget(self, connection: SimulatedConnection) -> None:
        self._connections.pop(connection, None)

    def process_ended(self, process: Process, *, silently: bool = False) -> None:
        """Closes the process's sockets, as its kernel does, unless the machine itself is gone."""
        for connection in self.connections:
            if process in (connection.client, connection.server):
                connection.end_of(process, silently=silently)

    def reset(self, connection: SimulatedConnection) -> None:
        """Ends a connection from the path between its sides."""
        connection.lost("connection reset")


class Direction:
    """What one process sends to the other on a connection."""

    def __init__(self, network: SimulatedNetwork, source: Process, target: Process) -> None:
        self._network = network
        self.source, self.target = source, target
        self._arrives_at = 0.0
        self._waiting: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._cut_at: float | None = None
        self.num_sent = 0
        self._pair = (source.machine.name, target.machine.name)

    def send(self, receive: Callable[..., None], *args: Any) -> None:
        """Calls `receive(*args)` in the target, after everything sent before."""
        self.num_sent += 1
        self._network.num_sent += 1
        if self._waiting or not self.open:
            if self._cut_at is None:
                self._cut_at = self._network.loop.now
            self._waiting.append((receive, args))
            return
        self._deliver(receive, args, self._network.delay_s())

    @property
    def open(self) -> bool:
        return self._pair not in self._network._cut

    def healed(self) -> None:
        """Delivers what waits when TCP resends it: the longer the path was cut, the later."""
        if not self._waiting or not self.open:
            return
        cut_s = self._network.loop.now - (self._cut_at or 0.0)
        repeat_s = min(max(cut_s, _REPEAT_S), _LONGEST_REPEAT_S) * self._network._rng.random()
        waiting, self._waiting, self._cut_at = self._waiting, deque(), None
        for receive, args in waiting:
            self._deliver(receive, args, repeat_s + self._network.delay_s())

    def _deliver(self, receive: Callable[..., None], args: tuple[Any, ...], delay_s: float) -> None:
        self._arrives_at = max(self._arrives_at, self._network.loop.now + delay_s)
        self._network.loop.deliver(self._arrives_at, receive, args, self.target.context)


class SimulatedConnection:
    """A TCP connection that carries HTTP/2. The accepting listener sets `server_end`."""

    def __init__(self, network: SimulatedNetwork, client: Process, server: Process, client_end: End) -> None:
        self.client, self.server = client, server
        self.to_server = Direction(network, client, server)
        self.to_client = Direction(network, server, client)
        self.client_end: End = client_end
        self.server_end: End | None = None
        self.alive = True
        self._network = network
        self._client_answers_since = self._server_answers_since = network.loop.now
        self._watch()

    def healed(self) -> None:
        self.to_server.healed()
        self.to_client.healed()

    def lost(self, why: str) -> None:
        """Ends the connection for both sides, as soon as they run."""
        if self.alive:
            self.alive = False
            self._network.forget(self)
            self._tell(self.client, self.client_end, why)
            self._tell(self.server, self.server_end, why)

    def end_of(self, process: Process, *, silently: bool) -> None:
        """Ends the connection of an ended process.

        Its peer notices by the connection's end, or by silence.
        """
        peer, end = (self.server, self.server_end) if process is self.client else (self.client, self.client_end)
        path = self.to_server if process is self.client else self.to_client
        self.alive = False
        self._network.forget(self)
        if silently or not path.open:
            keepalive_s = sum(SERVER_KEEPALIVE_S if peer is self.server else CLIENT_KEEPALIVE_S)
            peer.call_later(keepalive_s, self._lost_end, end, "keepalive watchdog timeout")
        elif end is not None:
            path.send(end.connection_lost, "Socket closed")

    def _lost_end(self, end: End | None, why: str) -> None:
        if end is not None:
            end.connection_lost(why)

    def _tell(self, process: Process, end: End | None, why: str) -> None:
        if end is not None:
            process.call_later(0.0, end.connection_lost, why)

    def _watch(self) -> None:
        """Pings: each side gives up a peer that has not answered for the keepalive time.

        gRPC's own threads answer, so a blocked loop still answers pings; a stopped process does
        not.
        """
        if not self.alive:
            return
        now = self._network.loop.now
        if self._answers(self.server):
            self._server_answers_since = now
        if self._answers(self.client):
            self._client_answers_since = now
        if now - self._server_answers_since > sum(CLIENT_KEEPALIVE_S) or now - self._client_answers_since > sum(
            SERVER_KEEPALIVE_S
        ):
            self.lost("keepalive watchdog timeout")
            return
        self._network.loop.call_later(_KEEPALIVE_LOOK_S, self._watch)

    def _answers(self, process: Process) -> bool:
        return process.runs and self.to_server.open and self.to_client.open


_KEEPALIVE_LOOK_S = 5.0
