"""What breaks the form of an answer is seen, in objects and in calls."""

from __future__ import annotations

import pytest

from ryzanstein.lab.chaos.questions import FORM_QUESTIONS
from ryzanstein.lab.chaos.stage.layouts import FORMS
from ryzanstein.lab.clients.forms import CallForm, ObjectForm
from ryzanstein.lab.clients.judge import judge
from ryzanstein.lab.clients.reading import AnswerReading, CallPiece, ChoiceRead, Piece

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
OBJECT, CALL = ObjectForm(SCHEMA), CallForm({"f": SCHEMA, "g": {"type": "object", "maxProperties": 0}})


def called(*pieces: tuple[int, str, str], text: str = "") -> ChoiceRead:
    choice = ChoiceRead(text=text, reason="FINISH_REASON_TOOL_CALLS")
    for number, name, arguments in pieces:
        choice.take_call(CallPiece(number, "id" if name else "", name, arguments))
    return choice


def test_an_object_of_the_schema_has_no_flaw() -> None:
    assert OBJECT.flaw(ChoiceRead(text='{"a": 1}')) == ""


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no JSON"),
        ('{"a": 1', "no JSON"),
        ('{"a": 1}}', "no JSON"),
        ('{"a": "1"}', "is not of type 'integer'"),
        ('{"a": 1, "b": 2}', "Additional properties"),
    ],
)
def test_what_is_no_object_of_the_schema_is_seen(text: str, says: str) -> None:
    assert says in OBJECT.flaw(ChoiceRead(text=text))


def test_calls_in_pieces_have_no_flaw() -> None:
    assert CALL.flaw(called((0, "f", '{"a"'), (0, "", ": 1}"), (1, "g", "{}"))) == ""


@pytest.mark.parametrize(
    ("choice", "says"),
    [
        (called(), "0 calls"),
        (called((0, "f", '{"a": 1}'), text="beside"), "beside"),
        (called((0, "f", '{"a": 1}'), (2, "g", "{}")), "calls [0, 2]"),
        (called((0, "h", "{}")), "a call of 'h'"),
        (called((0, "f", '{"a": 1}'), (1, "f", '{"a"')), "no JSON"),
        (called((0, "g", '{"a": 1}')), "expected to be empty"),
    ],
)
def test_what_is_no_call_is_seen(choice: ChoiceRead, says: str) -> None:
    assert says in CALL.flaw(choice)


def test_a_named_function_is_the_only_one() -> None:
    form = CallForm(CALL.functions, "f")
    assert form.flaw(called((0, "f", '{"a": 1}'))) == ""
    assert form.flaw(called((0, "g", "{}"))) == "a call of 'g'"


def answer(text: str = "", calls: tuple[CallPiece, ...] = (), reason: str = "stop") -> AnswerReading:
    reading = AnswerReading("object", generation_id="g")
    reading.take(Piece(0, 0, [1, 2], text, calls=calls))
    reading.finished(0, reason)
    return reading


def test_an_answer_that_is_the_same_and_invalid_is_not_flawless() -> None:
    """A node that continues with another constraint would spoil the undisturbed answer too."""
    verdict = judge(answer('{"a": 1'), answer('{"a": 1'), OBJECT)
    assert verdict.formed
    assert not verdict.differences
    assert not verdict.flawless
    assert "no JSON" in verdict.flaws[0]


def test_an_answer_that_failed_is_not_asked_for_its_form() -> None:
    part = answer('{"a": 1')
    part.failure = "UNAVAILABLE"
    verdict = judge(answer('{"a": 1}'), part, OBJECT)
    assert (verdict.failed, verdict.formed, verdict.flaws) == (True, False, ())


@pytest.mark.parametrize(
    "other",
    [
        (CallPiece(0, "x", "f", '{"a": 2}'),),
        (CallPiece(0, "x", "g", '{"a": 1}'),),
        (),
        (CallPiece(0, "x", "f", '{"a": 1}'), CallPiece(1, "y", "g", "{}")),
    ],
)
def test_other_calls_than_without_a_fault_are_a_change(other: tuple[CallPiece, ...]) -> None:
    whole = answer(calls=(CallPiece(0, "its-own-id", "f", '{"a": 1}'),))
    assert judge(whole, answer(calls=(CallPiece(0, "another", "f", '{"a": 1}'),)), CALL).flawless
    assert any("the calls differ" in what for what in judge(whole, answer(calls=other), CALL).differences)


def test_a_call_that_begins_twice_is_repeated() -> None:
    seen = answer(calls=(CallPiece(0, "x", "f", '{"a": 1}'),))
    seen.take(Piece(0, 2, [], calls=(CallPiece(0, "x", "f", ""),)))
    assert seen.num_repeated == 1


def test_of_a_failed_answer_the_calls_that_came_are_compared() -> None:
    whole = answer(calls=(CallPiece(0, "x", "f", '{"a": 1}'),))
    for arguments, differs in (('{"a"', False), ('{"b"', True)):
        part = answer(calls=(CallPiece(0, "y", "f", arguments),))
        part.failure = "UNAVAILABLE"
        assert bool(judge(whole, part).differences) is differs


def test_each_kind_of_form_is_requested_over_each_face() -> None:
    assert FORMS.forms
    formed = [question for question in FORM_QUESTIONS if question.form is not None]
    assert {(type(question.form), question.face) for question in formed} == {
        (form, face) for form in (ObjectForm, CallForm) for face in ("grpc", "sse", "websocket")
    }
