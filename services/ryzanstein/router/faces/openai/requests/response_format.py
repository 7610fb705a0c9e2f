"""Constraints in HTTP bodies: OpenAI's `response_format`, and vLLM's `structured_outputs` and `guided_*`.

Only the form is checked here; whether a schema can be enforced is found on the node.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import msgspec
from msgspec import UNSET, Raw, UnsetType

from ryzanstein import errors
from ryzanstein.constraints import FIELD, MAX_CONSTRAINT_BYTES, Constraint
from ryzanstein.errors import RyzansteinError

if TYPE_CHECKING:
    from ryzanstein.router.faces.openai.requests.schemas import GenerationOptions

_NULL = b"null"


class _JsonSchema(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """With `strict` a schema that cannot be enforced whole is refused, without it the rest of it is enforced."""

    name: str = ""
    description: str | None = None
    schema: Raw | UnsetType = UNSET
    strict: bool | None = None


class _ResponseFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: _JsonSchema | None = None


class _StructuredOutputs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """vLLM's. The last fields are hints for other implementations and change nothing here."""

    json: Raw | UnsetType = UNSET
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool | None = None
    disable_fallback: bool | None = None
    disable_additional_properties: Literal[False] | None = None
    whitespace_pattern: None = None
    structural_tag: None = None


def constraint_of(body: GenerationOptions) -> Constraint | None:
    """Returns the constraint that a body requests. INVALID_ARGUMENT: it requests several, or one is malformed."""
    given = list(_given(body))
    if len(given) > 1:
        raise errors.invalid(given[1][0], f"conflicts with {given[0][0]}: an answer has one constraint")
    return given[0][1] if given else None


@contextmanager
def naming_the_constraint(body: GenerationOptions) -> Iterator[None]:
    """Has errors name the field in which the client wrote the constraint."""
    try:
        yield
    except RyzansteinError as error:
        raise error.with_fields(lambda field: _field_of(body) if field.startswith(FIELD) else field) from None


def _field_of(body: GenerationOptions) -> str:
    names = ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs")
    return next((name for name in names if not _absent(getattr(body, name))), "response_format")


def _given(body: GenerationOptions) -> Iterator[tuple[str, Constraint]]:
    if (constraint := _of_response_format(body.response_format)) is not None:
        yield "response_format", constraint
    if (constraint := _of_structured_outputs(body.structured_outputs)) is not None:
        yield "structured_outputs", constraint
    if not _absent(body.guided_json):
        yield "guided_json", _schema(body.guided_json, "guided_json")
    if body.guided_regex is not None:
        yield "guided_regex", Constraint.regex(body.guided_regex)
    if body.guided_choice is not None:
        yield "guided_choice", Constraint.choice(body.guided_choice)
    if body.guided_grammar is not None:
        yield "guided_grammar", Constraint.grammar(body.guided_grammar)


def _of_response_format(raw: Raw | None) -> Constraint | None:
    if _absent(raw):
        return None
    asked: _ResponseFormat = _decoded(raw, _ResponseFormat, "response_format")
    match asked.type:
        case "text":
            return None
        case "json_object":
            return Constraint.json_object()
        case "json_schema":
            if asked.json_schema is None or asked.json_schema.schema is UNSET:
                raise errors.invalid("response_format.json_schema", "must have a schema")
            return _schema(asked.json_schema.schema, "response_format.json_schema.schema", lenient=not asked.json_schema.strict)


def _of_structured_outputs(raw: Raw | None) -> Constraint | None:
    if _absent(raw):
        return None
    asked: _StructuredOutputs = _decoded(raw, _StructuredOutputs, "structured_outputs")
    given: dict[str, Constraint] = {}
    if asked.json is not UNSET and not _absent(asked.json):
        given["json"] = _schema(asked.json, "structured_outputs.json")
    if asked.regex is not None:
        given["regex"] = Constraint.regex(asked.regex)
    if asked.choice is not None:
        given["choice"] = Constraint.choice(asked.choice)
    if asked.grammar is not None:
        given["grammar"] = Constraint.grammar(asked.grammar)
    if asked.json_object:
        given["json_object"] = Constraint.json_object()
    if len(given) != 1:
        raise errors.invalid("structured_outputs", "must have exactly one of json, regex, choice, grammar and json_object")
    return next(iter(given.values()))


def _schema(raw: Raw | None, field: str, *, lenient: bool = False) -> Constraint:
    """Returns the constraint to a schema, which may also be written as a string."""
    text = bytes(raw or b"")
    if len(text) > 2 * MAX_CONSTRAINT_BYTES:
        raise errors.invalid(field, f"must have at most {MAX_CONSTRAINT_BYTES} bytes", len(text))
    if text.lstrip()[:1] == b'"':
        return Constraint.json_schema(_decoded(raw, str, field), lenient=lenient)
    return Constraint.json_schema(text.decode(), lenient=lenient)


def _absent(value: object) -> bool:
    return value is None or (isinstance(value, Raw) and bytes(value) == _NULL)


def _decoded(raw: Raw | None, kind: type[Any], field: str) -> Any:
    try:
        return msgspec.json.decode(raw or b"", type=kind)
    except RecursionError:
        raise errors.invalid(field, "is nested too deeply") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise errors.invalid(field, str(error)) from None
