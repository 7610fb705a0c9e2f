"""The part of the API's schema that FastAPI does not read itself: bodies, and what answers them."""

from __future__ import annotations

from typing import Any

import msgspec

from ryzanstein.router.faces.openai.answers.types import ErrorAnswer
from ryzanstein.router.faces.openai.requests.schemas import Body


def described(body: type[Body] | None, answer: type[msgspec.Struct] | None = None) -> dict[str, Any]:
    """Returns an operation's `requestBody` and the answer that it gets, with their parts written out where they are used."""
    operation: dict[str, Any] = {}
    if body is not None:
        operation["requestBody"] = {"required": True, "content": _json(schema_of(body))}
    if answer is not None:
        text = (answer.__doc__ or "").split("\n", 1)[0]
        operation["responses"] = {"200": {"description": text, "content": _json(schema_of(answer))}, "default": _failed()}
    return operation


def schema_of(kind: type[msgspec.Struct]) -> Any:
    """Returns the JSON Schema of a type, with its parts written out where they are used."""
    (_, parts) = msgspec.json.schema_components([kind], ref_template="{name}")
    return _written_out(parts[kind.__name__], parts)


def _json(schema: Any) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def _written_out(schema: Any, parts: dict[str, Any]) -> Any:
    match schema:
        case {"$ref": name}:
            return _written_out(parts[name], parts)
        case dict():
            return {key: _written_out(value, parts) for key, value in schema.items()}
        case list():
            return [_written_out(value, parts) for value in schema]
    return schema


def _failed() -> dict[str, Any]:
    return {"description": "An error, in OpenAI's form", "content": _json(schema_of(ErrorAnswer))}
