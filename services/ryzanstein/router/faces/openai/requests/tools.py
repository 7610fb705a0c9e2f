"""Converts `tools`, `tool_choice` and `parallel_tool_calls` of a chat body."""

from __future__ import annotations

from dataclasses import replace

from ryzanstein import errors
from ryzanstein.generation.request import SamplingParams
from ryzanstein.generation.tools import NO_TOOLS, Tool, ToolMode, Tools
from ryzanstein.router.faces.openai.requests.schemas import ChatCompletionRequest, OfferedTool, ToolChoice

_MODES = {mode.value: mode for mode in ToolMode if mode is not ToolMode.NAMED}


def tools_of(body: ChatCompletionRequest) -> Tools:
    """Returns what the assistant may call. Raises INVALID_ARGUMENT that names the field."""
    mode, named = _choice(body.tool_choice)
    offered = tuple(_tool(tool, f"tools[{i}]") for i, tool in enumerate(body.tools or ()))
    tools = Tools(offered, mode, named, body.parallel_tool_calls is not False)
    tools.validate()
    return tools if offered else NO_TOOLS


def without_format(sampling: SamplingParams, tools: Tools) -> SamplingParams:
    """Returns the parameters without a form of the answer if it has to be a call, which has the form of its function.

    Some clients send both.
    """
    return replace(sampling, constraint=None) if tools.must and sampling.constraint is not None else sampling


def _tool(tool: OfferedTool, path: str) -> Tool:
    if tool.type != "function":
        raise errors.invalid(f"{path}.type", "only functions are supported", tool.type[:64])
    if (function := tool.function) is None:
        raise errors.invalid(f"{path}.function", "is required")
    schema = "" if function.parameters is None else bytes(function.parameters).decode()
    return Tool(function.name, function.description or "", "" if schema == "null" else schema, bool(function.strict))


def _choice(choice: str | ToolChoice | None) -> tuple[ToolMode, str]:
    if choice is None:
        return ToolMode.AUTO, ""
    if isinstance(choice, str):
        if choice not in _MODES:
            raise errors.invalid("tool_choice", f"must be one of {', '.join(_MODES)}, or name a function", choice[:64])
        return _MODES[choice], ""
    if choice.type != "function":
        raise errors.invalid("tool_choice.type", "must be function", choice.type[:64])
    if choice.function is None:
        raise errors.invalid("tool_choice.function", "is required")
    return ToolMode.NAMED, choice.function.name
