"""POST /v1/embeddings: refused, because every model that a cluster serves generates text."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI, Request
from msgspec import Raw
from starlette.responses import Response

from ryzanstein import errors
from ryzanstein.router.core.core import Core
from ryzanstein.router.faces.http.bodies import BodyReader
from ryzanstein.router.faces.http.openapi import described
from ryzanstein.router.faces.http.prompts import name_of
from ryzanstein.router.faces.http.schemas import Body

_ABSENT: Any = None


class EmbeddingRequest(Body, frozen=True, kw_only=True):
    """POST /v1/embeddings."""

    model: str | None = None
    input: Raw = _ABSENT
    dimensions: Raw = _ABSENT
    encoding_format: str | None = None
    user: str | None = None


def add_embedding_routes(app: FastAPI, core: Core, reader: BodyReader) -> None:
    decoder = msgspec.json.Decoder(EmbeddingRequest)

    @app.post("/v1/embeddings", openapi_extra=described(EmbeddingRequest))
    async def embeddings(http: Request) -> Response:
        """Raises NOT_FOUND for an unknown model, else NO_EMBEDDINGS."""
        _, model = await reader.read(http, decoder, lambda body: name_of(body.model or "", "model"))
        if model and model not in {each.name for each in core.models()}:
            raise errors.not_found("model", model)
        named = f"model {model!r}" if model else "the model"
        raise errors.failed_precondition("NO_EMBEDDINGS", f"{named} generates text; it is not made for embeddings")
