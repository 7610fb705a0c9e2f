"""Which constraint an answer follows: the form that was asked for, the calls that it must be, or either.

No part of the way of a request without a constraint.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ryzanstein import errors
from ryzanstein.constraints import MAX_CONSTRAINT_BYTES, Constraint
from ryzanstein.errors import RyzansteinError
from ryzanstein.generation.prompts import ChatPrompt
from ryzanstein.generation.reply_format import ReplyStyle
from ryzanstein.generation.request import Attempt
from ryzanstein.generation.tools import Tools
from ryzanstein.worker.constraints.refusal import ConstraintRefused
from ryzanstein.worker.text.call_grammar import call_constraint, form_or_calls
from ryzanstein.worker.text.grammars.judge import ConstraintJudge, Verdict
from ryzanstein.worker.text.tokenizer import TextModel


@dataclass(frozen=True, slots=True)
class Judged:
    """A constraint that can be enforced, and the table of tokens that rank 0 needs for it."""

    verdict: Verdict
    table: bytes


async def enforced(
    attempt: Attempt, reply: ReplyStyle | None, model: TextModel, judge: ConstraintJudge
) -> tuple[Attempt, Judged | None]:
    """Returns the attempt with the constraint that its answer follows, and the verdict on it.

    A function that is only offered refuses nothing: where it cannot be enforced, a form is alone. Raises the
    errors of `constrained` and `judged`.
    """
    chosen = constrained(attempt, reply, model)
    try:
        return chosen, await judged(chosen, model, judge)
    except RyzansteinError as error:
        if error.reason != "INVALID_CONSTRAINT" or attempt.request.sampling.constraint in (
            None,
            chosen.request.sampling.constraint,
        ):
            raise
    return attempt, await judged(attempt, model, judge)


async def judged(attempt: Attempt, model: TextModel, judge: ConstraintJudge) -> Judged | None:
    """Returns the verdict on the attempt's constraint, if it has one. Raises the errors of `ConstraintJudge`."""
    constraint = attempt.request.sampling.constraint
    if constraint is None:
        return None
    try:
        verdict = await judge.judge(constraint, model, attempt.request.cache_scope)
    except RyzansteinError as error:
        prompt = attempt.request.prompt
        if error.violations and isinstance(prompt, ChatPrompt) and prompt.tools.must:
            raise errors.about_field(error, "tools") from None
        raise
    return Judged(verdict, await judge.tokens(model))


def constrained(attempt: Attempt, reply: ReplyStyle | None, model: TextModel) -> Attempt:
    """Returns the attempt with the grammar of its calls, if its answer has to be a call or may be one instead of a form.

    Raises INVALID_ARGUMENT if the request demands another form too, or if the grammar is too long.
    """
    request = attempt.request
    if not isinstance(request.prompt, ChatPrompt) or reply is None:
        return attempt
    if not request.prompt.tools.must:
        return _may_call(attempt, request.prompt.tools, reply, model)
    if request.sampling.constraint is not None:
        raise errors.invalid("tool_choice", "conflicts with a constraint on the answer, which then cannot be a call")
    constraint = call_constraint(request.prompt.tools, reply, model.special_id)
    if (num_bytes := len(constraint.text.encode())) > MAX_CONSTRAINT_BYTES:
        bound = f"are too long for a call that is required: as a grammar at most {MAX_CONSTRAINT_BYTES} bytes"
        raise errors.invalid("tools", bound, num_bytes)
    return _with_constraint(attempt, constraint)


def _may_call(attempt: Attempt, tools: Tools, reply: ReplyStyle, model: TextModel) -> Attempt:
    """Returns the attempt with a grammar of its form or calls, if it may call functions and has a form."""
    form = attempt.request.sampling.constraint
    if form is None or not reply.calls:
        return attempt
    try:
        return _with_constraint(attempt, form_or_calls(form, tools, reply, model.special_id))
    except ConstraintRefused:
        return attempt  # the form alone is refused again when it is judged, by its own name


def _with_constraint(attempt: Attempt, constraint: Constraint) -> Attempt:
    sampling = replace(attempt.request.sampling, constraint=constraint)
    return replace(attempt, request=replace(attempt.request, sampling=sampling))
