"""POST /v1/embeddings: vectors of texts, from models that are made for it.

The inputs are pure: a client that asks again gets the same vectors, so nothing is kept for it and
an Idempotency-Key changes nothing. A client that leaves ends the work.
"""

from __future__ import annotations

import asyncio
import base64
import re
import sys
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import cast

import msgspec
from fastapi import FastAPI, Request
from starlette.responses import Response

from ryzanstein import errors
from ryzanstein.embeddings import MAX_INPUTS, Embedded, EmbeddingRequest, EmbedInput
from ryzanstein.errors import RyzansteinError
from ryzanstein.generation.prompts import TextPrompt, TokenPrompt, user_key
from ryzanstein.generation.request import valid_priority
from ryzanstein.router.core.core import Core
from ryzanstein.router.faces.http.bodies import BodyReader
from ryzanstein.router.faces.http.gate import call_of
from ryzanstein.router.faces.http.serving.presence import while_connected
from ryzanstein.router.faces.openai.openapi import described
from ryzanstein.router.faces.openai.requests.prompts import deadline_of, name_of
from ryzanstein.router.faces.openai.requests.sampling import token_ids_of, whole
from ryzanstein.router.faces.openai.requests.schemas import Body, TokenId, Whole
from ryzanstein.router.faces.origin import RequestOrigin

_INPUTS = re.compile(r"inputs((?:\[[0-9]+\])?)(?:\.(?:text|token_ids))?")
_LARGE_NUMBERS = 16_384
"""An answer with more numbers is written in a thread, a vector at a time."""


class EmbeddingBody(Body, frozen=True, kw_only=True):
    """POST /v1/embeddings."""

    model: str | None = None
    input: str | list[str | TokenId | list[TokenId]]
    dimensions: Whole | None = None
    encoding_format: str | None = None
    user: str | None = None
    # Extensions of the OpenAI API.
    prompt_name: str | None = None
    priority: Whole | None = None


class EmbeddingEntry(msgspec.Struct, frozen=True):
    """A vector: numbers, or with encoding_format base64 their bytes in single precision, little-endian."""

    embedding: list[float] | str
    index: int
    object: str = "embedding"


class EmbeddingUsage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    total_tokens: int


class EmbeddingList(msgspec.Struct, frozen=True):
    """The answer, with the vectors in the order of the inputs."""

    data: list[EmbeddingEntry]
    model: str
    usage: EmbeddingUsage
    object: str = "list"


def add_embedding_routes(app: FastAPI, core: Core, reader: BodyReader) -> None:
    decoder = msgspec.json.Decoder(EmbeddingBody)

    @app.post("/v1/embeddings", openapi_extra=described(EmbeddingBody, EmbeddingList))
    async def embeddings(http: Request) -> Response:
        origin = call_of(http.scope).origin
        try:
            body, asked = await reader.read(http, decoder, lambda body: embedding_request(body, http.headers, origin))
            # Named now: it may be another one when the vectors are there.
            asked = replace(asked, model=asked.model or core.model_of(""))
            embedded = await while_connected(http.receive, core.embed(asked))
        except RyzansteinError as error:
            raise error.with_fields(_as_written) from None
        as_base64 = body.encoding_format == "base64"
        if sum(len(each.values) for each in embedded) <= _LARGE_NUMBERS:
            content = _written(embedded, asked.model, as_base64)
        else:
            content = await asyncio.to_thread(_written, embedded, asked.model, as_base64)
        return Response(content, media_type="application/json")


def embedding_request(body: EmbeddingBody, headers: Mapping[str, str], origin: RequestOrigin) -> EmbeddingRequest:
    """Returns the request of a body. Raises INVALID_ARGUMENT that names the field."""
    if body.encoding_format not in (None, "float", "base64"):
        raise errors.invalid("encoding_format", "must be float or base64", body.encoding_format[:64])
    request = EmbeddingRequest(
        model=name_of(body.model or "", "model"),
        inputs=_inputs(body.input),
        dimensions=whole("dimensions", body.dimensions),
        prompt_name=name_of(body.prompt_name or "", "prompt_name"),
        priority=valid_priority(whole("priority", body.priority) or 0),
        deadline=deadline_of(headers),
    )
    request.validate()
    return origin.owned_texts(request, user_key(body.user or "", "user"))


def _inputs(given: str | list[str | int | float | list[int | float]]) -> tuple[EmbedInput, ...]:
    if isinstance(given, str):
        given = [given]
    kinds = set(map(type, given))
    if kinds and kinds <= {int, float}:
        return (TokenPrompt(token_ids_of("input", cast("list[int | float]", given))),)
    if not kinds <= {str} and not kinds <= {list}:
        raise errors.invalid("input", "must be a text, a list of token ids, or a list of either")
    if len(given) > MAX_INPUTS:
        raise errors.invalid("input", f"must have at most {MAX_INPUTS} entries", len(given))
    if not given or not all(cast("list[str | list[int | float]]", given)):
        raise errors.invalid("input", "must not be empty")
    return tuple(
        TextPrompt(each) if isinstance(each, str) else TokenPrompt(token_ids_of(f"input[{i}]", each))
        for i, each in enumerate(cast("list[str | list[int | float]]", given))
    )


def _as_written(field: str) -> str:
    """Returns a field of EmbeddingRequest as a body has it: `input[3]` for `inputs[3].text`."""
    found = _INPUTS.fullmatch(field)
    return field if found is None else f"input{found[1]}"


def _written(embedded: Sequence[Embedded], model: str, as_base64: bool) -> bytes:
    """Returns the answer as JSON. The encoder holds the interpreter for a vector at a time."""
    entries = b",".join(
        msgspec.json.encode(EmbeddingEntry(_encoded(each.values, as_base64), i)) for i, each in enumerate(embedded)
    )
    num_tokens = sum(each.prompt_tokens for each in embedded)
    frame = EmbeddingList([], model, EmbeddingUsage(num_tokens, num_tokens))
    return msgspec.json.encode(frame).replace(b'"data":[]', b'"data":[' + entries + b"]", 1)


def _encoded(values: array[float], as_base64: bool) -> list[float] | str:
    if not as_base64:
        return values.tolist()
    if sys.byteorder == "big":
        values = array("f", values)
        values.byteswap()
    return base64.b64encode(values.tobytes()).decode()
