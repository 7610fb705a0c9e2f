"""The router's metrics on the serving port, for scrapers that reach no other."""

from __future__ import annotations

import asyncio

from fastapi import FastAPI, Request
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from starlette.responses import Response


def add_metrics(app: FastAPI, registry: CollectorRegistry) -> None:
    """Adds `/metrics`. One answer at a time is written, in a thread."""
    turn = asyncio.Lock()

    @app.get("/metrics")
    async def metrics(http: Request) -> Response:
        encode, content_type = choose_encoder(http.headers.get("accept", ""))
        async with turn:
            content = await asyncio.to_thread(encode, registry)
        return Response(content, headers={"Content-Type": content_type})
