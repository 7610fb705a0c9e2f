"""What a response looks like: the object itself, its items, and their identities.

An item has one identity, made of its generation's: the same while it is streamed, in the object
that ends the stream, and when the response is retrieved.
"""

from __future__ import annotations

import json
from typing import Any

from ryzanstein.generation import FinishReason, Started, Usage
from ryzanstein.router.faces.http.responses.body import ResponsesRequest

PREFIX = "resp_"
_COMPLETE = frozenset({FinishReason.STOP, FinishReason.UNSPECIFIED})

Shape = dict[str, Any]


def response_id(generation_id: str) -> str:
    return PREFIX + generation_id


def message_id(generation_id: str) -> str:
    return f"msg_{generation_id}"


def begun(started: Started, body: ResponsesRequest) -> Shape:
    """Returns the response as it begins: without output."""
    return {
        "id": response_id(started.generation_id),
        "object": "response",
        "created_at": started.created,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "model": started.model,
        "output": [],
        "parallel_tool_calls": True,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": body.reasoning.effort if body.reasoning is not None else None, "summary": None},
        "store": body.store is not False,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "text": {"format": _format(body)},
        "tool_choice": "auto",
        "tools": [],
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": body.user,
        "metadata": body.metadata or {},
    }


def _format(body: ResponsesRequest) -> Shape:
    form = body.text.format if body.text is not None else None
    if form is None or form.type != "json_schema":
        return {"type": "text" if form is None else form.type}
    schema = None if form.schema is None else json.loads(bytes(form.schema))
    return {"type": form.type, "name": form.name, "schema": schema, "strict": True}


def ended(response: Shape, generation_id: str, text: str, reason: FinishReason, usage: Usage) -> Shape:
    """Returns the response with its output."""
    status, details = _status(reason)
    item = message(generation_id, text, "completed" if status == "completed" else "incomplete")
    return response | {
        "status": status,
        "incomplete_details": details,
        "output": [item],
        "usage": usage_shape(usage),
    }


def failed(response: Shape, code: str, message: str) -> Shape:
    return response | {"status": "failed", "error": {"code": code, "message": message}}


def message(generation_id: str, text: str | None, status: str) -> Shape:
    """Returns the item of the answer. `text` None: it has no content yet."""
    content = [] if text is None else [part(text)]
    return {"id": message_id(generation_id), "type": "message", "status": status, "role": "assistant", "content": content}


def part(text: str) -> Shape:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def usage_shape(usage: Usage) -> Shape:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_prompt_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _status(reason: FinishReason) -> tuple[str, Shape | None]:
    if reason in _COMPLETE:
        return "completed", None
    if reason is FinishReason.CANCELLED:
        return "cancelled", None
    return "incomplete", {"reason": "max_output_tokens"}
