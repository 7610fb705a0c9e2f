"""One stream: all of this router's generations of one model of a node.

Keeps the stream open, reconnects with back-off, passes tokens to attempts, and notifies its
observer when the node comes, goes or changes. The end of the stream counts as the node's death:
every attempt on it is notified at once. A link knows nothing of other nodes.
"""

from __future__ import annotations

import asyncio
import random
import time
from typing import Protocol

import grpc
import structlog

from ryzanstein import errors
from ryzanstein.cluster import NO_MODEL, OWN_ENGINE, Beat, NodeState, Numerics, TokenOrigin
from ryzanstein.generation.request import ADAPTERS, Attempt
from ryzanstein.process.awake import AwakeClock
from ryzanstein.router.nodes.links.adapters import LinkAdapters
from ryzanstein.router.nodes.links.connection import (
    BEAT_S,
    WORKING_BEAT_S,
    Connection,
    NotConnectedError,
    connect,
)
from ryzanstein.router.nodes.links.frames import AttemptSink, deliver
from ryzanstein.router.nodes.links.phi_detector import (
    IDLE_INTERVAL_S,
    QUIET_INTERVAL_S,
    WORKING_INTERVAL_S,
    BeatIntervals,
    PhiThresholds,
)
from ryzanstein.router.nodes.links.suspicion import SuspicionLevel, SuspicionWatch
from ryzanstein.rpc.client import PLAIN, Dialer
from ryzanstein.v1 import worker_pb2 as worker
from ryzanstein.wire.attempts import submit_now
from ryzanstein.wire.membership import beat_from_wire

log = structlog.get_logger(__name__)

NODE_STATE = "node_state"
UNLOADED = "unloaded"
CLOSED = "closed"
FIRST_BACKOFF_S = 0.05
LONGEST_BACKOFF_S = 1.0
_SHORTEST_BEAT_S, _LONGEST_BEAT_S = 0.001, 10.0
# UNSPECIFIED, a state that this version does not know, is not a loss: if such a node loses a
# generation, it reports that for the generation.
_SERVING = (NodeState.READY, NodeState.DRAINING, NodeState.UNSPECIFIED)


class LinkObserver(Protocol):
    """Receives what happens to a link. Its methods must neither block nor raise."""

    def outlives(self, link: NodeLink) -> bool:
        """Returns whether a departed link connects again."""
        ...

    def name_taken(self, link: NodeLink, node_id: str, incarnation: str) -> bool:
        """Returns whether another process with this node id is linked, so that this link may not be."""
        ...

    def link_up(self, link: NodeLink, restarted: bool) -> None:
        """Called when the link is up. `restarted`: the node is a different process than before."""
        ...

    def link_down(self, link: NodeLink, cause: str) -> None: ...

    def link_changed(self, link: NodeLink) -> None:
        """Called when the node's state, model or health changed."""
        ...

    def link_beat(self, link: NodeLink, load_only: bool) -> None:
        """Called after each beat, before the calls that report what it changed. `load_only`: at most its load changed."""
        ...

    def link_loaded(self, link: NodeLink) -> None:
        """Called when the number of this router's attempts there changed."""
        ...

    def link_suspected(self, link: NodeLink, cause: str) -> None: ...

    def link_progressed(self, link: NodeLink, num_tokens: int) -> None:
        """Called after a frame with this many new tokens."""
        ...


class NodeLink:
    """The link to one model of the node at an address. Empty: its first model.

    Start `run` as a task; cancelling that task closes the link.
    """

    def __init__(
        self,
        address: str,
        router_id: str,
        thresholds: PhiThresholds,
        observer: LinkObserver,
        awake: AwakeClock,
        *,
        model: str = "",
        dialer: Dialer = PLAIN,
    ) -> None:
        self.address = address
        self.model = model
        self.node_id = ""
        self.beat = Beat()
        self.features: frozenset[str] = frozenset()
        """What the node understands beyond the first version of the protocol."""
        self.numerics = Numerics()
        """How it computes, or did when it was last ready."""
        self.engine = OWN_ENGINE
        """What computes there, or did when it was last ready."""
        self.adapters = LinkAdapters()
        self.clock_skew_s = 0.0
        self.departed = False
        self.failure = ""
        """Why the last try to connect failed; empty: it did not."""
        self.newest_begun: dict[tuple[str, int], int] = {}
        """By tenant and priority: the handle of the last submitted attempt with output."""
        self._incarnation = ""
        self._held: tuple[str, int] = ("", 0)
        self._router_id = router_id
        self._dialer = dialer
        self._thresholds = thresholds
        self._observer = observer
        self._awake = awake
        self._connection: Connection | None = None
        self._watch: SuspicionWatch | None = None
        self._sinks: dict[int, AttemptSink] = {}
        self._last_handle = 0

    @property
    def incarnation(self) -> str:
        """The process that the node was when it was last up."""
        return self._incarnation

    def end(self, cause: str) -> None:
        """Ends the stream, if there is one. The link connects again."""
        if self._connection is not None:
            self._connection.end(cause)

    @property
    def origin(self) -> TokenOrigin:
        """What decides whether others go on with its tokens."""
        return TokenOrigin(self.numerics, self.engine.continues_exactly)

    @property
    def connected(self) -> bool:
        return self._connection is not None

    @property
    def serves(self) -> bool:
        return self.beat.state is NodeState.READY and bool(self.beat.model)

    @property
    def inflight(self) -> int:
        return len(self._sinks)

    @property
    def beat_interval_s(self) -> float:
        """How often this router beats.

        The interval is short while attempts run, so that a deaf node is detected while clients wait
        for it.
        """
        return WORKING_BEAT_S if self._sinks else QUIET_INTERVAL_S if self.beat.quiet else BEAT_S

    def beaten(self, sequence: int) -> None:
        if self._watch is not None:
            self._watch.asked(sequence)

    @property
    def suspected(self) -> bool:
        return self._watch is not None and self._watch.level is not SuspicionLevel.FINE

    @property
    def suspicion(self) -> str:
        """Why the node is suspected; empty if it is not."""
        return "" if self._watch is None else self._watch.cause

    @property
    def punctual(self) -> bool:
        return self._watch is not None and self._watch.punctual

    @property
    def known_model(self) -> str:
        """The model that the node serves, or served before it was away or loaded it again."""
        if self.beat.state is NodeState.STARTING and self.beat.reason == NO_MODEL:
            return ""
        return self.beat.model or self.model or self._held[0]

    @property
    def held(self) -> tuple[str, int]:
        """The model that the node had when it was last ready, and its context; empty if it never was."""
        return self._held

    def context_of(self, model: str) -> int:
        """Returns the node's context for the model; 0 if unknown.

        A node that is not ready counts with the context that it had when it was last ready.
        """
        return self._held[1] if self._held[0] == model else 0

    def submit(self, attempt: Attempt, sink: AttemptSink) -> int:
        """Sends an attempt and returns its handle. Raises UNAVAILABLE when the link is down."""
        if self._connection is None:
            raise errors.unavailable("LINK_DOWN", f"no link to node {self.node_id}")
        self._last_handle += 1
        self._sinks[self._last_handle] = sink
        self._connection.send(worker.ConnectRequest(submit=submit_now(attempt, self._last_handle)), sink.submitted)
        if self._watch is not None:
            self._watch.expect()
        self._observer.link_loaded(self)
        return self._last_handle

    def cancel(self, handle: int) -> None:
        """Ends an attempt on the node. Its sink receives nothing more."""
        if self._sinks.pop(handle, None) is not None:
            self._tell_cancelled(handle)
            self._observer.link_loaded(self)

    def release(self, handle: int) -> None:
        """Forgets an attempt that has ended on the node."""
        if self._sinks.pop(handle, None) is not None:
            self._observer.link_loaded(self)

    @property
    def channel(self) -> grpc.aio.Channel:
        """The channel to the node, for calls beside the stream. Raises UNAVAILABLE when the link is down."""
        if self._connection is None:
            raise errors.unavailable("LINK_DOWN", f"no link to node {self.node_id}")
        return self._connection.channel

    async def run(self) -> None:
        """Connects and reconnects until the node has departed. Cancelling it closes the link."""
        backoff_s = FIRST_BACKOFF_S
        while not self.departed or self._observer.outlives(self):
            if await self._stream():
                backoff_s = FIRST_BACKOFF_S
            # Jitter, so that many routers do not reconnect to a restarted node at the same moment.
            await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))
            backoff_s = min(2 * backoff_s, LONGEST_BACKOFF_S)

    async def _stream(self) -> bool:
        """Serves one stream from its hello to its end. Returns False if there was no hello."""
        try:
            async with connect(self.address, self._router_id, self.model, self._dialer) as connection:
                hello = connection.hello
                if self._observer.name_taken(self, hello.node_id, hello.incarnation):
                    raise NotConnectedError(f"another node has the id {hello.node_id}")
                cause = CLOSED
                try:
                    self._up(connection)
                    cause = await connection.serve(self._receive, self)
                finally:
                    self._down(cause)
        except NotConnectedError as error:
            self._not_connected(str(error))
            return False
        return True

    def _not_connected(self, why: str) -> None:
        """Remembers why there is no stream, and logs it once."""
        if why != self.failure:
            log.info("node not reached", node_id=self.node_id, address=self.address, why=why)
        self.failure = why

    def _up(self, connection: Connection) -> None:
        hello = connection.hello
        restarted = bool(self._incarnation) and hello.incarnation != self._incarnation
        self.node_id, self._incarnation = hello.node_id, hello.incarnation
        self.features = frozenset(hello.features)
        if restarted and ADAPTERS not in self.features:
            self.adapters.forget()
        self._connection, self.failure = connection, ""
        self._watch = SuspicionWatch(self._thresholds, self._on_level, self._awake, _intervals(hello))
        self._watch.start()
        self.beat = beat_from_wire(hello.beat)
        self._remember_ranks()
        self._watch.beat(self.beat)
        log.info("link up", node_id=self.node_id, address=self.address, restarted=restarted)
        self._observer.link_up(self, restarted)

    def _down(self, cause: str) -> None:
        self._connection = None
        if self._watch is not None:
            self._watch.close()
            self._watch = None
        # Open the breaker first: a failover that starts now must not choose this node again.
        self._observer.link_down(self, cause)
        generations = self._lose_all(cause)
        log.warning("link down", node_id=self.node_id, address=self.address, cause=cause, generations=generations)

    def _lose_all(self, cause: str) -> int:
        now = time.monotonic()
        lost, self._sinks = self._sinks, {}
        self._observer.link_loaded(self)
        for sink in lost.values():
            sink.lost(cause, now)
        return len(lost)

    def _receive(self, frame: worker.ConnectResponse) -> None:
        if frame.HasField("output"):
            if self._watch is not None:
                self._watch.frame()
            self._observer.link_progressed(self, deliver(frame.output, self._sinks))
        elif frame.HasField("beat"):
            for handle in frame.beat.preparing:
                if (sink := self._sinks.get(handle)) is not None:
                    sink.preparing()
            if frame.beat.ack and self._watch is not None:
                self._watch.answered(frame.beat.ack)
            self._on_beat(beat_from_wire(frame.beat))
        elif frame.HasField("ack") and self._watch is not None:
            self._watch.answered(frame.ack.sequence)
        elif frame.HasField("adapters") and self.adapters.take(frame.adapters):
            self._observer.link_changed(self)

    def _remember_ranks(self) -> None:
        """Remembers context, numerics and engine of a ready node: a node without ranks does not know its own."""
        if self.beat.state is NodeState.READY:
            self._held = (self.beat.model, self.beat.context_length)
            self.numerics, self.engine = self.beat.numerics, self.beat.engine

    def _on_beat(self, beat: Beat) -> None:
        before, self.beat = self.beat, beat
        self._remember_ranks()
        self.clock_skew_s = beat.time - time.time() if beat.time else 0.0
        self._observer.link_beat(self, _but_load(beat) == _but_load(before))
        if self._watch is not None:
            self._watch.beat(beat)
        if _constant(beat) != _constant(before):
            self._observer.link_changed(self)
        if beat.state is before.state and beat.model == before.model:
            return
        log.info("node changed", node_id=self.node_id, state=beat.state.name, model=beat.model, reason=beat.reason)
        self._observer.link_changed(self)
        if beat.state not in _SERVING:
            # A node that lost its ranks lost what ran on them, whether or not it reports each
            # generation.
            for handle in self._sinks:
                self._tell_cancelled(handle)
            self._lose_all(UNLOADED if beat.state is NodeState.STARTING else NODE_STATE)

    def _tell_cancelled(self, handle: int) -> None:
        if self._connection is not None:
            self._connection.send(worker.ConnectRequest(cancel=worker.Cancel(handle=handle)))

    def _on_level(self, level: SuspicionLevel, cause: str) -> None:
        now = time.monotonic()
        if level is SuspicionLevel.DEAD and self._connection is not None:
            self._connection.end(cause)
        elif level is SuspicionLevel.SUSPECT:
            self._observer.link_suspected(self, cause)
            log.warning("node suspected", node_id=self.node_id, cause=cause, generations=len(self._sinks))
            for sink in list(self._sinks.values()):
                sink.suspected(cause, now)
        self._observer.link_changed(self)


def _but_load(beat: Beat) -> tuple[object, ...]:
    """Returns what the router keeps of a beat, without what changes in most of them."""
    return beat.state, beat.model, beat.context_length, beat.reason, *_constant(beat)


def _constant(beat: Beat) -> tuple[object, ...]:
    """Returns what seldom changes in a node's beats, and matters to the choice of nodes."""
    return beat.other_models, beat.numerics, beat.engine, beat.reserve


def _intervals(hello: worker.NodeHello) -> BeatIntervals:
    """Returns the node's own intervals, clamped to the range of its settings.

    An older node sends none and gets the defaults.
    """
    busy_s = hello.beat_busy.seconds + hello.beat_busy.nanos / 1e9 if hello.HasField("beat_busy") else WORKING_INTERVAL_S
    idle_s = hello.beat_idle.seconds + hello.beat_idle.nanos / 1e9 if hello.HasField("beat_idle") else IDLE_INTERVAL_S
    return BeatIntervals(_within(busy_s), _within(idle_s))


def _within(interval_s: float) -> float:
    return min(max(interval_s, _SHORTEST_BEAT_S), _LONGEST_BEAT_S)
