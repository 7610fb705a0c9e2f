"""Requests for vectors, and vectors, to the wire and back."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

from ryzanstein import errors
from ryzanstein.embeddings import MAX_INPUTS, Embedded, EmbeddingRequest, EmbedInput
from ryzanstein.generation.prompts import TextPrompt, TokenPrompt
from ryzanstein.v1 import embedding_pb2 as pb
from ryzanstein.v1 import inference_pb2 as inference
from ryzanstein.wire.requests import name_from_wire


def embed_from_wire(wire: pb.EmbedRequest, max_tokens: int | None = None) -> EmbeddingRequest:
    """Returns the request without what only a call knows.

    The cache scope is not among it: only a node believes it, and it reads it itself. At most
    `max_tokens` ids are converted of one input. Raises INVALID_ARGUMENT that names the field.
    """
    if len(wire.inputs) > MAX_INPUTS:
        raise errors.invalid("inputs", f"must have at most {MAX_INPUTS} entries", len(wire.inputs))
    request = EmbeddingRequest(
        model=name_from_wire(wire.model, "model"),
        inputs=tuple(_input(each, f"inputs[{i}]", max_tokens) for i, each in enumerate(wire.inputs)),
        dimensions=wire.dimensions if wire.HasField("dimensions") else None,
        prompt_name=name_from_wire(wire.prompt_name, "prompt_name"),
        priority=wire.priority,
    )
    request.validate()
    return request


def embed_to_wire(request: EmbeddingRequest, inputs: Sequence[EmbedInput]) -> pb.EmbedRequest:
    """Returns what a node is asked: some inputs of a request."""
    wire = pb.EmbedRequest(
        model=request.model,
        inputs=map(_wire_input, inputs),
        prompt_name=request.prompt_name,
        priority=request.priority,
        user=request.tenant,
        cache_scope=request.cache_scope,
    )
    if request.dimensions is not None:
        wire.dimensions = request.dimensions
    return wire


def embedded_to_wire(embedded: Iterable[Embedded], model: str) -> pb.EmbedResponse:
    return pb.EmbedResponse(
        embeddings=(pb.Embedding(values=each.values, prompt_tokens=each.prompt_tokens) for each in embedded), model=model
    )


def embedded_from_wire(wire: pb.EmbedResponse) -> list[Embedded]:
    return [Embedded(array("f", each.values), each.prompt_tokens) for each in wire.embeddings]


def _input(wire: pb.EmbedInput, path: str, max_tokens: int | None) -> EmbedInput:
    match wire.WhichOneof("input"):
        case "text":
            return TextPrompt(wire.text)
        case "token_ids":
            ids = wire.token_ids.ids
            if max_tokens is not None and len(ids) > max_tokens:
                raise errors.invalid(f"{path}.token_ids", f"must have at most {max_tokens} ids", len(ids))
            return TokenPrompt(tuple(ids))
    raise errors.invalid(path, "must be a text or token ids")


def _wire_input(given: EmbedInput) -> pb.EmbedInput:
    match given:
        case TextPrompt(text):
            return pb.EmbedInput(text=text)
        case TokenPrompt(token_ids):
            return pb.EmbedInput(token_ids=inference.TokenIds(ids=token_ids))
