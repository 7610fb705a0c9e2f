"""Tokens of a text and back, as vLLM's servers have it: /tokenize and /detokenize."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from fastapi import FastAPI, Request
from msgspec import Meta, Raw
from starlette.responses import JSONResponse, Response

from ryzanstein import errors
from ryzanstein.generation.prompts import ChatPrompt, Prompt, TextPrompt
from ryzanstein.router.core.core import Core
from ryzanstein.router.faces.http.bodies import BodyReader
from ryzanstein.router.faces.http.gate import call_of
from ryzanstein.router.faces.openai.answers.types import DetokenizeAnswer, TokenizeAnswer
from ryzanstein.router.faces.openai.openapi import described
from ryzanstein.router.faces.openai.requests.messages import conversation
from ryzanstein.router.faces.openai.requests.prompts import name_of, template_options
from ryzanstein.router.faces.openai.requests.sampling import token_ids_of
from ryzanstein.router.faces.openai.requests.schemas import Body, ChatMessage, TokenId
from ryzanstein.router.faces.origin import allowed_model

MAX_TOKENS = 131_072
_ABSENT: Any = None


class TokenizeBody(Body, frozen=True, kw_only=True):
    """POST /tokenize: a prompt, or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: Raw = _ABSENT
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body, frozen=True, kw_only=True):
    """POST /detokenize."""

    model: str | None = None
    tokens: Annotated[list[TokenId], Meta(max_length=MAX_TOKENS)]


def add_text_routes(app: FastAPI, core: Core, reader: BodyReader, max_messages: int) -> None:
    tokenize_decoder = msgspec.json.Decoder(TokenizeBody)
    detokenize_decoder = msgspec.json.Decoder(DetokenizeBody)

    @app.post("/tokenize", openapi_extra=described(TokenizeBody, TokenizeAnswer))
    async def tokenize(http: Request) -> Response:
        body, prompt = await reader.read(http, tokenize_decoder, lambda body: _prompt(body, max_messages))
        model = allowed_model(call_of(http.scope).caller, name_of(body.model or "", "model"))
        special = body.add_special_tokens is not False
        found = await core.tokenize(model, prompt, special=special, with_texts=bool(body.return_token_strs))
        answer: dict[str, Any] = {"count": len(found.token_ids), "tokens": list(found.token_ids)}
        answer["max_model_len"] = _context(core, model)
        answer["token_strs"] = list(found.texts) if body.return_token_strs else None
        return Response(msgspec.json.encode(answer), media_type="application/json")

    @app.post("/detokenize", openapi_extra=described(DetokenizeBody, DetokenizeAnswer))
    async def detokenize(http: Request) -> Response:
        body, tokens = await reader.read(http, detokenize_decoder, lambda body: token_ids_of("tokens", body.tokens))
        model = allowed_model(call_of(http.scope).caller, name_of(body.model or "", "model"))
        return JSONResponse({"prompt": await core.detokenize(model, tokens)})


def _prompt(body: TokenizeBody, max_messages: int) -> Prompt:
    if (body.prompt is None) == (body.messages is None):
        raise errors.invalid("prompt", "either prompt or messages must be given")
    if body.prompt is not None:
        return TextPrompt(body.prompt)
    return ChatPrompt(conversation(body.messages or [], max_messages), template=template_options(body))


def _context(core: Core, model: str) -> int | None:
    served = [each for each in core.models() if not model or each.name == model]
    return served[0].context_length if served else None
