"""TextService: a model's tokens for a text, and back, for the tools of clients."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from grpc.aio import ServicerContext

from ryzanstein import errors
from ryzanstein.generation.prompts import ChatPrompt, TextPrompt
from ryzanstein.v1 import text_pb2 as pb
from ryzanstein.v1.text_pb2_grpc import TextServiceServicer
from ryzanstein.wire.requests import conversation_from_wire, name_from_wire, template_from_wire
from ryzanstein.worker.agent import intake
from ryzanstein.worker.agent.models import NodeModels
from ryzanstein.worker.agent.tokenizing import encoded
from ryzanstein.worker.text.templates.rendering import ChatRenderer

Context = ServicerContext[Any, Any]


class TextServicer(TextServiceServicer):
    """A thin adapter from gRPC to the text side of the node's models."""

    def __init__(self, models: NodeModels, templates: ChatRenderer) -> None:
        self._models = models
        self._templates = templates

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        node = self._models.of(name_from_wire(request.model, "model")).node
        model = node.text_of(request.model)
        special = not request.HasField("add_special_tokens") or request.add_special_tokens
        match request.WhichOneof("prompt"):
            case "conversation":
                chat = conversation_from_wire(request.conversation)
                prompt = ChatPrompt(chat.messages)
                prompt = replace(prompt, template=template_from_wire(request.template_options))
                token_ids = (await intake.tokenize(prompt, model, self._templates)).token_ids
            case "text" if request.HasField("suffix"):
                filled = await asyncio.to_thread(model.infill, request.text, request.suffix)
                return pb.TokenizeResponse(token_ids=filled.token_ids, infill=True, stop_token_ids=filled.stop_token_ids)
            case "text" if special:
                token_ids = (await intake.tokenize(TextPrompt(request.text), model, self._templates)).token_ids
            case "text":
                token_ids = await encoded(model.encode_bare, request.text, len(request.text))
            case _:
                raise errors.invalid("prompt", "a conversation or a text is required")
        # In a thread: there may be hundreds of thousands.
        texts = await asyncio.to_thread(lambda: list(map(model.token_text, token_ids))) if request.with_texts else []
        return pb.TokenizeResponse(token_ids=token_ids, texts=texts)

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Context) -> pb.DetokenizeResponse:
        node = self._models.of(name_from_wire(request.model, "model")).node
        model = node.text_of(request.model)
        token_ids = model.checked_ids(request.token_ids)
        return pb.DetokenizeResponse(text=await asyncio.to_thread(model.spelled, token_ids))
