"""How a generation's answers are read: what its node said of the model, and what its request allows."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from ryzanstein.generation.prompts import MAX_TOOL_CALLS, ChatPrompt, Prompt
from ryzanstein.generation.reply_format import ReplyFormat, ReplyStyle
from ryzanstein.generation.tools import Tool, ToolMode
from ryzanstein.replies.families import FAMILIES, UNQUOTED
from ryzanstein.replies.tags import REASONING

_MAX_DEPTH = 8


def reply_format(prompt: Prompt, style: ReplyStyle) -> ReplyFormat | None:
    """Returns the format; None: the text is content alone.

    A family, or tags, that only a newer node knows are read as none: they are content.
    """
    thinking = style.thinking and style.tags in REASONING
    tools = prompt.tools if isinstance(prompt, ChatPrompt) else None
    callable = () if tools is None or style.calls not in FAMILIES else tools.callable
    if tools is None or not callable:
        return ReplyFormat(thinking=True, opened=style.opened, tags=style.tags) if thinking else None
    texts = dict(_texts(callable)) if style.calls in UNQUOTED else {}
    return ReplyFormat(
        style.calls,
        thinking,
        style.opened,
        tuple(tool.name for tool in callable),
        MAX_TOOL_CALLS if tools.parallel and tools.mode is not ToolMode.NAMED else 1,
        tools.mode is ToolMode.NAMED,
        style.tags,
        tuple(texts),
        tuple(name for name, nullable in texts.items() if nullable),
    )


def _texts(tools: Sequence[Tool]) -> Iterator[tuple[str, bool]]:
    """Yields the arguments that are texts (`function:argument`), and whether each may be null."""
    for tool in tools:
        schema = json.loads(tool.parameters) if tool.parameters else {}
        properties = schema.get("properties") if isinstance(schema, dict) else None
        for name, each in properties.items() if isinstance(properties, dict) else ():
            types = _types(each, schema, 0)
            if "string" in types and types <= {"string", "null"}:
                yield f"{tool.name}:{name}", "null" in types


def _types(schema: Any, root: Any, depth: int) -> set[str]:
    """Returns the types that a value may have; "" stands for any."""
    if not isinstance(schema, dict) or depth > _MAX_DEPTH:
        return {""}
    if isinstance(reference := schema.get("$ref"), str):
        return _types(_referred(reference, root), root, depth + 1)
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            return set().union(*(_types(each, root, depth + 1) for each in schema[key]))
    values = schema["enum"] if isinstance(schema.get("enum"), list) else [schema["const"]] if "const" in schema else None
    if "type" not in schema and values is not None:
        return {"string" if isinstance(each, str) else "null" if each is None else "" for each in values}
    types = schema.get("type", "")
    return {each for each in types if isinstance(each, str)} if isinstance(types, list) else {str(types)}


def _referred(reference: str, root: Any) -> Any:
    for part in reference.removeprefix("#/").split("/"):
        root = root.get(part) if isinstance(root, dict) else None
    return root
