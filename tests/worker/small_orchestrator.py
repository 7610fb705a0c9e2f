"""A small orchestrator: it grants leases, answers each beat with `answer`, and remembers what it heard."""

from __future__ import annotations

import asyncio
from typing import Any

from ryzanstein import errors
from ryzanstein.cluster import Instruction
from ryzanstein.rpc.server import RpcServer
from ryzanstein.v1 import orchestrator_pb2 as pb
from ryzanstein.v1.orchestrator_pb2_grpc import OrchestratorServiceServicer, add_OrchestratorServiceServicer_to_server
from ryzanstein.wire.membership import instruction_to_wire


class SmallOrchestrator(OrchestratorServiceServicer):
    """Start it with `serve`. Changing `leases` voids the present one."""

    def __init__(self) -> None:
        self.leases, self.interval_ms = 0, 20
        self.nodes: list[pb.Node] = []
        self.beats: asyncio.Queue[pb.HeartbeatRequest] = asyncio.Queue()
        self.left: list[tuple[str, str]] = []
        self.answer = pb.HeartbeatResponse()
        self.leader, self.known, self.answers_by = (0, ""), [], lambda sequence: 0
        self.server: RpcServer

    async def serve(self, port: int = 0) -> None:
        self.server = RpcServer("127.0.0.1", port, ["ryzanstein.v1.OrchestratorService"])
        add_OrchestratorServiceServicer_to_server(self, self.server.server)
        await self.server.start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server.port}"

    async def RegisterNode(self, request: pb.RegisterNodeRequest, context: Any) -> pb.RegisterNodeResponse:
        self.leases += 1
        self.nodes.append(request.node)
        self.known.append((request.known_epoch, request.known_leader_id))
        epoch, name = self.leader
        response = pb.RegisterNodeResponse(lease_id=f"lease-{self.leases}", leader_epoch=epoch, leader_id=name)
        response.heartbeat_interval.FromMilliseconds(self.interval_ms)
        return response

    async def Heartbeat(self, request_iterator: Any, context: Any) -> Any:
        async for request in request_iterator:
            if request.lease_id != f"lease-{self.leases}":
                raise errors.not_found("lease", request.lease_id)
            self.beats.put_nowait(request)
            answer = pb.HeartbeatResponse()
            answer.CopyFrom(self.answer)
            (answer.leader_epoch, answer.leader_id), answer.sequence = self.leader, self.answers_by(request.sequence)
            yield answer

    async def LeaveNode(self, request: pb.LeaveNodeRequest, context: Any) -> pb.LeaveNodeResponse:
        self.left.append((request.node_id, request.lease_id))
        return pb.LeaveNodeResponse()

    async def next_beat(self) -> pb.HeartbeatRequest:
        return await asyncio.wait_for(self.beats.get(), 10)

    def instruct(self, *deployments: Any, **more: Any) -> None:
        self.answer = instruction_to_wire(Instruction(deployments, **more))

    async def until(self, condition: Any, timeout_s: float = 60) -> pb.HeartbeatRequest:
        """The first beat from now on of which `condition(models by name)` holds."""
        while not self.beats.empty():
            self.beats.get_nowait()
        async with asyncio.timeout(timeout_s):
            while True:
                beat = await self.beats.get()
                if condition({report.model: report for report in beat.models}):
                    return beat
