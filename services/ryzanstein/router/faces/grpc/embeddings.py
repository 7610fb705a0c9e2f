"""The gRPC face of vectors: a unary call, which ends its work when it is cancelled."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import grpc

from ryzanstein.generation.prompts import user_key
from ryzanstein.router.core.core import Core
from ryzanstein.router.faces.grpc.call import Calls
from ryzanstein.v1 import embedding_pb2 as pb
from ryzanstein.v1.embedding_pb2_grpc import EmbeddingServiceServicer
from ryzanstein.wire.embeddings import embed_from_wire, embedded_to_wire
from ryzanstein.wire.requests import MostParts

_Context = grpc.aio.ServicerContext[Any, Any]
_LARGE_NUMBERS = 131_072


class EmbeddingServicer(EmbeddingServiceServicer):
    """`EmbeddingService` over a `Core`."""

    def __init__(self, core: Core, calls: Calls, most: MostParts) -> None:
        self._core, self._calls, self._most = core, calls, most

    async def Embed(self, request: pb.EmbedRequest, context: _Context) -> pb.EmbedResponse:
        with self._calls.call("Embed", context) as call:
            user = user_key(request.user, "user")
            wanted = embed_from_wire(request, self._most.token_ids)
            asked = call.origin.owned_texts(wanted, user)
            asked = replace(asked, model=asked.model or self._core.model_of(""), deadline=call.deadline)
            embedded = await self._core.embed(asked)
            if sum(len(each.values) for each in embedded) <= _LARGE_NUMBERS:
                return embedded_to_wire(embedded, asked.model)
            return await asyncio.to_thread(embedded_to_wire, embedded, asked.model)
