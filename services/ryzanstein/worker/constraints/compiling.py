"""Compiles grammars within limits. Used by the grammar process to judge them, by rank 0 to run them."""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING, Any

from ryzanstein.constraints import Constraint, ConstraintKind
from ryzanstein.worker.constraints.lark import grammar
from ryzanstein.worker.constraints.refusal import Cause, ConstraintRefused
from ryzanstein.worker.constraints.schemas import finite
from ryzanstein.worker.constraints.schemas.easing import enforceable
from ryzanstein.worker.constraints.schemas.schema import checked_schema
from ryzanstein.worker.constraints.table import TokenTable

if TYPE_CHECKING:
    from ryzanstein.worker.constraints.guidance import LLMatcher, LLParserLimits, LLTokenizer

_MAX_REASON_CHARS = 300
_MAX_PARTS = 128


def compiled(constraint: Constraint, table: TokenTable, tokenizer: LLTokenizer) -> LLMatcher:
    """Returns a matcher at the beginning of an answer. Raises ConstraintRefused.

    The first mask is computed: a grammar that admits nothing shows there.
    """
    from ryzanstein.worker.constraints.guidance import LLMatcher

    limits = _limits(constraint.kind)
    matcher = LLMatcher(tokenizer, grammar(constraint, table.special_id), log_level=0, limits=limits)
    if matcher.is_error() and constraint.lenient:
        easier = grammar(constraint, table.special_id, partial(enforceable, error_of=partial(_error_of, constraint.kind)))
        matcher = LLMatcher(tokenizer, easier, log_level=0, limits=limits)
    if not matcher.is_error():
        matcher.compute_bitmask()
    if error := matcher.get_error() or _too_wide(matcher, table):
        refused = _refused(error)
        raise ConstraintRefused(refused.cause, refused.reason, _where(constraint, refused.reason))
    return matcher


def _too_wide(matcher: LLMatcher, table: TokenTable) -> str:
    """Returns the error if a limit is exceeded after the brace of an object, where all its properties may follow."""
    if b"{" not in table.tokens:
        return ""
    begun = matcher.deep_copy()
    begun.consume_token(table.tokens.index(b"{"))
    error = str(begun.get_error())
    return "an object has too many optional properties; the limit is about 490" if " items; max is" in error else ""


def _where(constraint: Constraint, reason: str) -> str:
    """Returns the path of the smallest part of a schema that is refused for the same reason, or nothing.

    llguidance does not say it. Only so many parts are tried, the innermost first.
    """
    if constraint.kind is not ConstraintKind.JSON_SCHEMA:
        return ""
    found = sorted(
        finite.parts(checked_schema(constraint.text, lenient=constraint.lenient), "#"), key=lambda part: -part[0].count("/")
    )
    for path, part in found[:_MAX_PARTS]:
        if _error_of(constraint.kind, part) == reason:
            return path
    return ""


def _error_of(kind: ConstraintKind, schema: Any) -> str:
    """Returns why a schema is refused by itself, or nothing."""
    from ryzanstein.worker.constraints.guidance import LLMatcher

    error = LLMatcher.validate_grammar(f"start: %json {json.dumps(schema)}", limits=_limits(kind))
    return _refused(error).reason if error else ""


def _limits(kind: ConstraintKind) -> LLParserLimits:
    """Returns the limits of a grammar, which bound its memory and the time of a mask.

    The time for a row of items grows with the cube of their number in an ambiguous grammar. In a
    schema it does not, and each optional property of an object takes four of them.
    """
    from ryzanstein.worker.constraints.guidance import LLParserLimits

    return LLParserLimits(
        max_lexer_states=50_000,
        max_grammar_size=200_000,
        max_items_in_row=600 if kind is ConstraintKind.GRAMMAR else 2000,
        verbose_errors=False,
    )


def _refused(error: str) -> ConstraintRefused:
    """Returns the refusal for an error of llguidance, without the excerpt of the grammar in it."""
    text = error.partition("\n<non-verbose/>")[0].partition("\n   1 |")[0].strip()
    text = text.rpartition("failed to compile JSON schema: ")[2].partition("\n  while processing")[0]
    if text.startswith("regex parse error"):
        text = f"the regular expression is not supported: {text.rpartition('error: ')[2]}"
    if text.startswith("oneOf constraints"):
        return ConstraintRefused(Cause.KEYWORD, "oneOf is supported only where no value matches two alternatives")
    if "NoExtension" in text:
        return ConstraintRefused(Cause.UNSATISFIABLE, "no answer of at least one token satisfies it")
    if "too big" in text or "too large" in text or "limit" in text:
        return ConstraintRefused(Cause.SIZE, text[:_MAX_REASON_CHARS])
    if "nsatisfiable" in text:
        return ConstraintRefused(Cause.UNSATISFIABLE, text[:_MAX_REASON_CHARS])
    return ConstraintRefused(Cause.GRAMMAR, text[:_MAX_REASON_CHARS])
