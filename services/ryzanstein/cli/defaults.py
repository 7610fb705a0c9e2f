"""Default addresses and directories of `ryzanstein up`, which the other commands use too."""

from __future__ import annotations

GRPC_PORT = 50051
HTTP_PORT = 8000
ORCHESTRATOR_PORT = 50050
ROUTER_ADDRESS = f"127.0.0.1:{GRPC_PORT}"
ORCHESTRATOR_ADDRESS = f"127.0.0.1:{ORCHESTRATOR_PORT}"
