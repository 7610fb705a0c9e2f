"""A node that only seems to be one: its own port, the real membership client, and answers from a script.

To the orchestrator it registers and beats as a node does, to routers it beats, acknowledges and streams. It has no
ranks, no models' files and no tokenizer. Its port is the builtin server's, which takes half as much for a beat as the
library's, a node's default: a machine has to carry a thousand of them beside what is measured.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import grpc

from ryzanstein.cluster import Beat, Instruction, Load, MemberAddresses, ModelReport, Node, NodeReport, NodeState
from ryzanstein.lab.bench.control.standins.link import CONTEXT_LENGTH, StandInLink, StandInState
from ryzanstein.lab.bench.control.standins.traffic import CountingDialer, Traffic
from ryzanstein.lab.bench.router.scripted.engine import ScriptedEngine
from ryzanstein.rpc.server import RpcServer
from ryzanstein.v1 import worker_pb2 as worker
from ryzanstein.worker.agent.membership.node_membership import NodeMembership
from ryzanstein.worker.telemetry.node_metrics import NodeMetrics

_SERVICE, _CONNECT = "ryzanstein.v1.WorkerService", "Connect"
_MEMORY_BYTES = 64 * 2**30


@dataclass(slots=True)
class StandInHost:
    """What the nodes of one process share."""

    orchestrator: str
    engine: ScriptedEngine
    metrics: NodeMetrics
    to_orchestrator: Traffic = field(default_factory=Traffic)
    to_routers: Traffic = field(default_factory=Traffic)


class StandInNode:
    """A `MembershipObserver`. `join`, and `leave` to be gone as a node that was stopped; it may join again."""

    def __init__(self, node_id: str, models: tuple[str, ...], host: StandInHost) -> None:
        self.state = StandInState(node_id, models)
        self.registered = False
        """The orchestrator has answered a beat since the last registration began."""
        self.rejoined = False
        """The same, since this was set to False."""
        self.links: dict[StandInLink, None] = {}
        self._host, self._address = host, ""
        self._digest, self._starts = b"", 0
        self._rpc: RpcServer | None = None
        self._membership = NodeMembership(host.orchestrator, self, host.metrics, CountingDialer(host.to_orchestrator))
        self._member: asyncio.Task[None] | None = None

    async def join(self) -> None:
        """Opens a port and becomes a member."""
        if self._member is not None:
            return
        self._starts += 1
        self.state.incarnation = str(self._starts)
        self._rpc = rpc = RpcServer("127.0.0.1", 0, [])
        handler = grpc.stream_stream_rpc_method_handler(
            self._connect,
            self._host.to_routers.receiving(worker.ConnectRequest.FromString),
            self._host.to_routers.sending(worker.ConnectResponse.SerializeToString),
        )
        rpc.server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, {_CONNECT: handler}),))
        await rpc.start()
        self._address = f"127.0.0.1:{rpc.port}"
        self._member = asyncio.create_task(self._membership.run())

    async def leave(self) -> None:
        """Leaves the cluster and closes the port."""
        if self._member is not None:
            await self._cancel()
            await self._membership.leave()
            await self._stop()

    async def close(self) -> None:
        """Is gone without a word, as a node that was killed."""
        if self._member is not None:
            await self._cancel()
            await self._stop()

    async def _cancel(self) -> None:
        assert self._member is not None
        self._member.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._member
        self._member, self.registered = None, False

    async def _stop(self) -> None:
        assert self._rpc is not None
        await self._rpc.stop(0)

    def work(self, *, busy: bool) -> None:
        self.state.busy = busy
        for link in self.links:
            link.wake()

    async def _connect(
        self, requests: AsyncIterator[worker.ConnectRequest], context: Any
    ) -> AsyncIterator[worker.ConnectResponse]:
        frames = aiter(requests)
        first = await anext(frames, None)
        if first is None:  # the router has given it up already
            return
        quiet_s = first.hello.quiet_interval.ToNanoseconds() / 1e9
        link = StandInLink(self._host.engine, self.state, first.hello.model, quiet_s)
        reader = asyncio.create_task(link.read(frames))
        self.links[link] = None
        try:
            async for frame in link.frames():
                yield frame
        finally:
            del self.links[link]
            reader.cancel()
            link.close()

    async def locate(self) -> None:
        self.registered = False

    def describe(self) -> Node:
        beat = self._beat()
        return Node(
            self.state.node_id,
            self._address,
            self.state.incarnation,
            state=beat.state,
            model=beat.model,
            context_length=beat.context_length,
            load=beat.load,
            models=self._reports(beat.load),
            memory_bytes=_MEMORY_BYTES,
        )

    def report(self) -> NodeReport:
        beat = self._beat()
        reports = self._reports(beat.load)
        return NodeReport(beat, reports, _MEMORY_BYTES, (), self._digest, b"", takes_member_changes=True)

    def follow(self, instruction: Instruction) -> None:
        self.registered = self.rejoined = True
        if isinstance(instruction.members, MemberAddresses) and instruction.members.since in (b"", self._digest):
            self._digest = instruction.members.digest

    async def wanted(self, timeout_s: float) -> None:
        await asyncio.sleep(timeout_s)

    def _beat(self) -> Beat:
        return self.state.report(sum(link.running for link in self.links))

    def _reports(self, load: Load) -> tuple[ModelReport, ...]:
        return tuple(
            ModelReport(
                model,
                f"/models/{model}",
                state=NodeState.READY,
                context_length=CONTEXT_LENGTH,
                load=load,
                memory_bytes=2**30,
                started_with=True,
            )
            for model in self.state.models
        )
