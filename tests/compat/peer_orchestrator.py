"""`python -m tests.compat.peer_orchestrator VERSION`: an orchestrator of another version, as a process.

It grants leases and reports beats. Each line of its standard input is what it answers beats with from
then on: a HeartbeatResponse as JSON.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any

from tests.compat.peer_server import lines, report, report_message, serve
from tests.compat.wires import Wire


class PeerOrchestrator:
    """The orchestrator: one lease per registration, which never expires."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._answer: dict[str, Any] = {}
        self._leases = 0

    async def register_node(self, request: Any, _context: Any) -> Any:
        self._leases += 1
        report_message("registered", request.node)
        answer = {"lease_id": f"lease-{self._leases}", "lease_duration": "3s", "heartbeat_interval": "0.100s"}
        return self._wire.parse(self._wire.message("RegisterNodeResponse"), answer)

    async def heartbeat(self, requests: AsyncIterator[Any], _context: Any) -> AsyncIterator[Any]:
        async for request in requests:
            report_message("beat", request)
            yield self._wire.parse(self._wire.message("HeartbeatResponse"), self._answer)

    async def leave_node(self, request: Any, _context: Any) -> Any:
        report("left", node_id=request.node_id)
        return self._wire.parse(self._wire.message("LeaveNodeResponse"), {})

    async def follow(self) -> None:
        """Takes the answers to give from standard input."""
        async for answer in lines():
            self._answer = answer


async def main() -> None:
    wire = Wire(sys.argv[1])
    orchestrator = PeerOrchestrator(wire)
    methods = {
        "RegisterNode": orchestrator.register_node,
        "Heartbeat": orchestrator.heartbeat,
        "LeaveNode": orchestrator.leave_node,
    }
    await asyncio.gather(orchestrator.follow(), serve(wire, "OrchestratorService", methods))


if __name__ == "__main__":
    asyncio.run(main())
