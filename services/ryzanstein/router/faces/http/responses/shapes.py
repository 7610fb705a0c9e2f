"""What a response looks like, without its items."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from ryzanstein.generation.request import NO_DEFAULTS, SamplingDefaults
from ryzanstein.generation.tokens import FinishReason, Started, Usage
from ryzanstein.router.faces.http.responses.body import ResponsesRequest, functions_of
from ryzanstein.router.faces.openai.answers.dialect import omitted_body

PREFIX = "resp_"
_COMPLETE = frozenset({FinishReason.STOP, FinishReason.UNSPECIFIED, FinishReason.TOOL_CALLS})

Shape = dict[str, Any]


def response_id(generation_id: str) -> str:
    return PREFIX + generation_id


def begun(started: Started, body: ResponsesRequest, defaults: SamplingDefaults = NO_DEFAULTS) -> Shape:
    """Returns the response as it begins: without output. `defaults` are the model's own, for what the body leaves out."""
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
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": body.reasoning.effort if body.reasoning is not None else None, "summary": None},
        "store": body.store is not False,
        "temperature": _first(body.temperature, defaults.temperature),
        "text": {"format": _format(body)},
        "tool_choice": _plain(body.tool_choice) or "auto",
        "tools": _plain(functions_of(body)),
        "top_p": _first(body.top_p, defaults.top_p),
        "truncation": "auto" if body.truncation == "auto" or started.omitted_prompt_tokens else "disabled",
        "usage": None,
        "user": body.user,
        "metadata": body.metadata or {},
    }


def _first(*values: float | None) -> float:
    """Returns the first value that is given; 1, the API's own default, where none is."""
    return next((value for value in values if value is not None), 1.0)


def _plain(value: object) -> Any:
    """Returns a part of the body as it was sent."""
    return msgspec.json.decode(msgspec.json.encode(value))


def _format(body: ResponsesRequest) -> Shape:
    form = body.text.format if body.text is not None else None
    if form is None or form.type != "json_schema":
        return {"type": "text" if form is None else form.type}
    schema = None if form.schema is None else json.loads(bytes(form.schema))
    return {"type": form.type, "name": form.name, "schema": schema, "strict": bool(form.strict)}


def ended(reason: FinishReason) -> tuple[str, Shape | None]:
    """Returns the status of a response that ended, and what is missing of it."""
    if reason in _COMPLETE:
        return "completed", None
    if reason is FinishReason.CANCELLED:
        return "cancelled", None
    return "incomplete", {"reason": "max_output_tokens"}


def usage_shape(usage: Usage, reasoning_tokens: int) -> Shape:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_prompt_tokens} | omitted_body(usage.omitted_prompt_tokens),
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
