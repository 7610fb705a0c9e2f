"""The part of the API's schema for bodies that FastAPI does not read itself."""

from __future__ import annotations

from typing import Any

import msgspec

from ryzanstein.router.faces.http.schemas import Body


def described(body: type[Body]) -> dict[str, Any]:
    """Returns an operation's `requestBody`, with its parts written out where they are used."""
    (_, parts) = msgspec.json.schema_components([body], ref_template="{name}")
    schema = _written_out(parts[body.__name__], parts)
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _written_out(schema: Any, parts: dict[str, Any]) -> Any:
    match schema:
        case {"$ref": name}:
            return _written_out(parts[name], parts)
        case dict():
            return {key: _written_out(value, parts) for key, value in schema.items()}
        case list():
            return [_written_out(value, parts) for value in schema]
    return schema
