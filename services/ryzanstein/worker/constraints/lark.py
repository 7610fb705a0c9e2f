"""Writes a constraint as a grammar for llguidance, in its variant of Lark."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from ryzanstein.constraints import Constraint, ConstraintKind
from ryzanstein.worker.constraints.refusal import Cause, ConstraintRefused
from ryzanstein.worker.constraints.schemas.schema import checked, checked_schema

# Forced text would be given as the tokens that a tokenizer makes of it; here each token is free that
# leads to it, and no tokenizer is needed.
_HEAD = '%llguidance {"no_forcing": true}\n'
_EMBEDDED = "%json"
# Strings, regular expressions and comments of a grammar, in which nothing is a directive.
_OPAQUE = re.compile(r'"(?:[^"\\\n]|\\.)*"|//[^\n]*|#[^\n]*|/(?:[^/\\\n]|\\.)+/|%json(?=\s*\{)|%llguidance\b')
_json = json.JSONDecoder()


Change = Callable[[Any], Any]


def _same(schema: Any) -> Any:
    return schema


def grammar(constraint: Constraint, special_id: Callable[[str], int | None], change: Change = _same) -> str:
    """Returns the grammar as llguidance's JSON, with each schema as `change` returns it. Raises ConstraintRefused.

    `special_id` returns the id of the special token with this text.
    """
    body = _HEAD + _body(constraint, change)
    if not constraint.after:
        return json.dumps({"grammars": [{"lark_grammar": body}]})
    head = _HEAD + _free(constraint.after, special_id(constraint.after))
    return json.dumps({"grammars": [{"lark_grammar": head}, {"name": "body", "lark_grammar": body}]})


def embedded_json(schema: Any, change: Change = _same) -> str:
    """Returns a schema as a part of a grammar. Raises ConstraintRefused."""
    return f"{_EMBEDDED} {json.dumps(change(checked(schema)))}"


def _body(constraint: Constraint, change: Change) -> str:
    match constraint.kind:
        case ConstraintKind.JSON_OBJECT:
            return f"start: {embedded_json({'type': 'object'})}"
        case ConstraintKind.JSON_SCHEMA:
            schema = change(checked_schema(constraint.text, lenient=constraint.lenient))
            return f"start: {_EMBEDDED} {json.dumps(schema)}"
        case ConstraintKind.REGEX:
            return f"start: TEXT\nTEXT: /{_regex(constraint.text)}/"
        case ConstraintKind.CHOICE:
            return "start: " + " | ".join(json.dumps(each, ensure_ascii=False) for each in constraint.alternatives)
        case ConstraintKind.GRAMMAR:
            return _own(constraint.text, change)


def _free(after: str, special_id: int | None) -> str:
    """Returns a grammar of any text up to and including `after`, and then the constraint itself."""
    if special_id is not None:
        return f"start: TEXT <[{special_id}]> @body\nTEXT: /(?s:.*)/"
    return f"start: free @body\nfree[lazy]: /(?s:.*){_regex(re.escape(after))}/"


def _regex(pattern: str) -> str:
    """Returns an expression as it is written between slashes.

    \\d, \\w and \\s are ASCII only. Line breaks would end the rule.
    """
    from ryzanstein.worker.constraints.guidance import regex_to_lark

    return str(regex_to_lark(pattern, "dws")).replace("\n", "\\n").replace("\r", "\\r")


def _own(text: str, change: Change) -> str:
    """Returns a client's grammar, with its embedded schemas checked like any other."""
    parts, end = [], 0
    for found in _OPAQUE.finditer(text):
        if found.start() < end:
            continue
        if found.group() == "%llguidance":
            raise ConstraintRefused(Cause.KEYWORD, "%llguidance is not supported: the node sets its options")
        if found.group() == _EMBEDDED:
            parts.append(text[end : found.start()])
            schema, end = _schema_at(text, found.end())
            parts.append(embedded_json(schema, change))
    return "".join((*parts, text[end:]))


def _schema_at(text: str, start: int) -> tuple[Any, int]:
    start += len(text[start:]) - len(text[start:].lstrip())
    try:
        return _json.raw_decode(text, start)
    except RecursionError:
        raise ConstraintRefused(Cause.SIZE, "a schema after %json is nested too deeply") from None
    except ValueError as error:
        raise ConstraintRefused(Cause.GRAMMAR, f"what follows %json is not JSON: {error}") from None
