"""The grammar of an answer that has to be a call, or may be one instead of JSON in a form.

With the first any model calls, and its arguments match the schema.

It is in llguidance's variant of Lark. The number of calls is bounded in it, and it has no white
space that could be repeated, so that no model runs on to its last token.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from ryzanstein import errors
from ryzanstein.constraints import MAX_CONSTRAINT_BYTES, Constraint, ConstraintKind
from ryzanstein.generation.reply_format import ReplyStyle
from ryzanstein.generation.tools import Tool, Tools
from ryzanstein.replies.families import DEEPSEEK_TOKENS
from ryzanstein.replies.tags import TAGS
from ryzanstein.worker.constraints.refusal import ConstraintRefused
from ryzanstein.worker.constraints.schemas.schema import checked, checked_schema
from ryzanstein.worker.text.calling import PYTHON, enforceable

MAX_CALLS = 16
"""So many calls an answer may have where the request allows several."""

SpecialId = Callable[[str], int | None]


def call_constraint(tools: Tools, style: ReplyStyle, special_id: SpecialId) -> Constraint:
    """Returns the constraint of an answer that must call one of the functions.

    `special_id` returns the id of the special token with this text. Where the prompt ends within the
    reasoning the calls come after the reasoning. Raises INVALID_ARGUMENT, which names the function, for
    parameters that cannot be enforced; what only `strict` demands is left out of those without it.
    """
    schemas = [_checked(tool, tools.offered.index(tool)) for tool in tools.callable]
    grammar = "start: calls\n" + _calls(style.calls, tools, schemas, lambda text: _literal(text, special_id))
    lenient = not any(tool.strict for tool in tools.callable)
    return replace(Constraint.grammar(grammar), after=TAGS[style.tags].end if style.opened else "", lenient=lenient)


def form_or_calls(form: Constraint, tools: Tools, style: ReplyStyle, special_id: SpecialId) -> Constraint:
    """Returns the constraint of an answer that has a form of JSON, or calls functions.

    The form itself where there is no grammar of calls, or both together are too long. Raises ConstraintRefused.
    """
    if form.kind not in _JSON or not enforceable(style.calls, tools):
        return form
    text = form.text if form.kind is ConstraintKind.JSON_SCHEMA else '{"type": "object"}'
    answer = f"start: answer | calls\nanswer: %json {json.dumps(checked_schema(text, lenient=form.lenient))}\n"
    schemas = [checked(_schema(tool), lenient=True) for tool in tools.callable]
    calls = _bare_call(tools, schemas) if style.calls == "llama3" else None
    both = answer + (calls or _calls(style.calls, tools, schemas, lambda text: _literal(text, special_id)))
    if len(both.encode()) > MAX_CONSTRAINT_BYTES:
        return form
    return replace(Constraint.grammar(both), after=form.after, lenient=form.lenient)


def _bare_call(asked: Tools, schemas: Sequence[Any]) -> str:
    """Returns the rules of one call that is a bare object, as schemas: beside JSON the lexer cannot tell its text apart.

    References of a schema are from its top, and do not hold within another.
    """
    objects = [
        {
            "type": "object",
            "properties": {
                "name": {"const": tool.name},
                "parameters": {"type": "object"} if "$ref" in tool.parameters else schema,
            },
            "required": ["name", "parameters"],
        }
        for tool, schema in zip(asked.callable, schemas, strict=True)
    ]
    return "calls: " + " | ".join(f"%json {json.dumps(each)}" for each in objects) + "\n"


_JSON = (ConstraintKind.JSON_OBJECT, ConstraintKind.JSON_SCHEMA)


def _calls(family: str, asked: Tools, schemas: Sequence[Any], literal: Callable[[str], str]) -> str:
    """Returns the rules of calls, whose arguments are as these schemas say."""
    begin, separator, end = _AROUND[family]
    several = asked.parallel and not asked.named and family not in ALONE
    rest = f" ({_words(separator, literal)} call){{0,{MAX_CALLS - 1}}}" if several else ""
    lines = [
        f"calls: {_words(begin, literal)} call{rest} {_words(end, literal)}",
        "call: " + " | ".join(f"call_{i}" for i in range(len(schemas))),
    ]
    for i, (tool, schema) in enumerate(zip(asked.callable, schemas, strict=True)):
        if family in PYTHON:
            lines += _python_call(i, tool.name, schema)
        else:
            lines.append(f"call_{i}: {_call(family, tool, schema, literal)}")
    return "\n".join(lines) + "\n"


ALONE = frozenset({"harmony"})
"""Families in which an answer ends with its first call."""
_CALLS_BEGIN, _CALL_BEGIN, _SEPARATOR, _CALL_END, _CALLS_END = DEEPSEEK_TOKENS
# What stands before the first call, between two, and after the last. Each part is a token or a text.
_AROUND: dict[str, tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]] = {
    "hermes": ((), ("\n",), ()),
    "generic": ((), ("\n",), ()),
    "llama3": ((), ("; ",), ()),
    "mistral": (("[TOOL_CALLS]", "["), (", ",), ("]",)),
    "ministral": ((), (), ()),
    "granite": (("<|tool_call|>", "["), (", ",), ("]",)),
    "cohere": (("<|START_ACTION|>", "["), (", ",), ("]", "<|END_ACTION|>")),
    "hunyuan": (("<tool_calls>", "["), (", ",), ("]", "</tool_calls>")),
    "harmony": ((), (), ()),
    "lfm2": (("<|tool_call_start|>", "["), (", ",), ("]", "<|tool_call_end|>")),
    "olmo3": (("<function_calls>",), ("\n",), ("</function_calls>",)),
    "deepseek": ((_CALLS_BEGIN,), ("\n",), (_CALLS_END,)),
}


# What stands around the arguments, where the name does not stand in an object with them.
_NAMED: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "deepseek": ((_CALL_BEGIN, "{name}", _SEPARATOR), (_CALL_END,)),
    "ministral": (("[TOOL_CALLS]", "{name}", "[ARGS]"), ()),
    "harmony": (("<|channel|>", "commentary to=functions.{name} ", "<|constrain|>", "json", "<|message|>"), ()),
}
_NAMES = {"llama3": ("name", "parameters"), "cohere": ("tool_name", "parameters")}


def _call(family: str, tool: Tool, schema: Any, literal: Callable[[str], str]) -> str:
    arguments = f"%json {json.dumps(schema)}"
    if family in _NAMED:
        before, after = _NAMED[family]
        return " ".join((_words([each.format(name=tool.name) for each in before], literal), arguments, _words(after, literal)))
    name, key = _NAMES.get(family, ("name", "arguments"))
    before, after = ("{" + f'"{name}": {json.dumps(tool.name)}, "{key}": ',), ("}",)
    if family in ("hermes", "generic"):
        before, after = ("<tool_call>", "\n", *before), (*after, "\n", "</tool_call>")
    return " ".join((_words(before, literal), arguments, _words(after, literal)))


def _python_call(index: int, name: str, schema: Any) -> Iterator[str]:
    """Yields the rules of a call in Python: its arguments in the schema's order, those that are not required or not.

    Of argument k, `some` is what may follow another argument, and `first` what may follow none.
    """
    properties, required = schema.get("properties", {}), schema.get("required", ())
    rule = f"call_{index}"
    yield f"{rule}: {json.dumps(f'{name}(')} {rule}_first_0 {json.dumps(')')}"
    for k, (key, each) in enumerate(properties.items()):
        rest = "" if key in required else f" | {rule}_{{}}_{k + 1}"
        yield f"{rule}_value_{k}: {json.dumps(f'{key}=')} %json {json.dumps(each)}"
        yield f"{rule}_first_{k}: {rule}_value_{k} {rule}_some_{k + 1}{rest.format('first')}"
        yield f'{rule}_some_{k}: ", " {rule}_value_{k} {rule}_some_{k + 1}{rest.format("some")}'
    yield from (f'{rule}_{kind}_{len(properties)}: ""' for kind in ("first", "some"))


def _words(texts: Sequence[str], literal: Callable[[str], str]) -> str:
    return " ".join(map(literal, texts))


def _literal(text: str, special_id: SpecialId) -> str:
    token_id = special_id(text)
    return json.dumps(text, ensure_ascii=False) if token_id is None else f"<[{token_id}]>"


def _checked(tool: Tool, place: int) -> dict[str, Any]:
    try:
        return checked(_schema(tool), lenient=not tool.strict)
    except ConstraintRefused as refused:
        error = errors.invalid(f"tools[{place}].function.parameters", str(refused))
        raise replace(error, reason="INVALID_CONSTRAINT", metadata={**error.metadata, "cause": refused.cause.value}) from None


def _schema(tool: Tool) -> dict[str, Any]:
    """Returns the schema of an object with the arguments; a function without parameters has none."""
    if not tool.parameters:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    schema: dict[str, Any] = json.loads(tool.parameters)
    types = schema.get("type", ["object"])
    return {**schema, "type": "object"} if isinstance(types, list) and "object" in types else schema
