"""Tools that the assistant may call: Python functions, or what describes one."""

from __future__ import annotations

import inspect
import json
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ryzanstein.v1 import inference_pb2 as pb

_TYPES: Mapping[Any, str] = {str: "string", int: "integer", float: "number", bool: "boolean", dict: "object", list: "array"}


def tool_of(given: pb.Tool | Mapping[str, Any] | Callable[..., Any]) -> pb.Tool:
    """Returns the tool: of a function with its name, its docstring and the types of its parameters.

    Raises TypeError for a function whose parameters have types that no JSON has.
    """
    if isinstance(given, pb.Tool):
        return given
    if isinstance(given, Mapping):
        function = given.get("function", given)
        parameters = function.get("parameters") or {}
        return pb.Tool(
            name=function["name"],
            description=function.get("description") or "",
            parameters=json.dumps(parameters) if parameters else "",
            strict=bool(function.get("strict")),
        )
    name = getattr(given, "__name__", "")
    return pb.Tool(name=name, description=inspect.getdoc(given) or "", parameters=json.dumps(_schema(name, given)))


def call_tool(functions: Mapping[str, Callable[..., Any]], call: pb.ToolCall) -> Any:
    """Returns what a function returns to a call; a failure is text, which the assistant reads.

    A coroutine is returned as it is.
    """
    function = functions.get(call.name)
    if function is None:
        return f"error: there is no function {call.name!r}"
    try:
        return function(**json.loads(call.arguments or "{}"))
    except Exception as error:  # the model reads the failure and can call again
        return failed(error)


def failed(error: Exception) -> str:
    """Returns the result that reports a failed function to the model."""
    return f"error: {type(error).__name__}: {error}"[:4096]


def result_of(call: pb.ToolCall, returned: Any) -> pb.Message:
    """Returns the message with the result of a call."""
    content = returned if isinstance(returned, str) else json.dumps(returned, default=str)
    return pb.Message(role=pb.ROLE_TOOL, tool_call_id=call.id, content=content)


def _schema(name: str, function: Callable[..., Any]) -> dict[str, Any]:
    hints = typing.get_type_hints(function)
    properties, required = {}, []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise TypeError(f"tools: {name} takes any number of arguments, which no schema describes")
        properties[parameter.name] = _type(hints.get(parameter.name, str), f"{name}, parameter {parameter.name}")
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _type(hint: Any, where: str) -> dict[str, Any]:
    origin, arguments = typing.get_origin(hint) or hint, typing.get_args(hint)
    if origin is typing.Literal:
        return {"enum": list(arguments)}
    given = [each for each in arguments if each is not type(None)]
    if len(given) < len(arguments) and len(given) == 1:  # X | None
        return _type(given[0], where)
    if isinstance(origin, type) and issubclass(origin, Sequence) and origin is not str:
        return {"type": "array", "items": _type(given[0], where)} if given else {"type": "array"}
    if origin not in _TYPES:
        raise TypeError(f"tools: {where}: no JSON type for {hint!r}; describe the tool with a schema")
    return {"type": _TYPES[origin]}
