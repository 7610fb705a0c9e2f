"""A reader that comes back at any index gets each part of calls and reasoning once, over HTTP and over gRPC."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from ryzanstein.generation.reply_format import ReplyFormat
from ryzanstein.generation.tokens import Delta, Finished, FinishReason, GenerationEvent, Started, Token, Usage
from ryzanstein.replies.reader import ReplyDelta, read_message
from ryzanstein.router.faces.answer import Answer
from ryzanstein.router.faces.grpc.inference import read_events
from ryzanstein.router.faces.openai.answers.cursor import Cursor
from ryzanstein.router.faces.openai.answers.pieces import Ending, Pieces, Speech
from ryzanstein.v1 import inference_pb2 as inference

TEXT = (
    '<think>\nhm\n</think>\n\nI look. \n<tool_call>{"name": "f", "arguments": {"a": "b \\" c"}}</tool_call>\n<tool_call>{"name'
)
TOKENS = [TEXT[i : i + 3] for i in range(0, len(TEXT), 3)]
FORMAT = ReplyFormat("hermes", True, False, ("f",))
WHOLE = read_message(FORMAT, "g", 0, TEXT)
LISTED = (WHOLE.content, WHOLE.reasoning, [(call.id, call.name, call.arguments) for call in WHOLE.tool_calls])


def started(format: ReplyFormat | None = FORMAT) -> Started:
    return Started("g", "m", "n", 3, reply=format)


def deltas(first: int = 0, size: int = 1) -> list[GenerationEvent]:
    """The rest of the answer from an index, so many tokens at once."""
    return [Delta(0, at, [Token(at, text) for text in TOKENS[at : at + size]], "n") for at in range(first, len(TOKENS), size)]


END = Finished(0, FinishReason.STOP, Usage(3, len(TOKENS)))


def joined(parts: list[ReplyDelta]) -> tuple[str, str, list[tuple[str, str, str]]]:
    calls: list[list[str]] = []
    for piece in (call for each in parts for call in each.calls):
        if piece.index == len(calls):
            calls.append([piece.id, piece.name, ""])
        assert not piece.id or calls[piece.index][2] == "", "a call begins once"
        calls[piece.index][2] += piece.arguments
    content, reasoning = "".join(each.content for each in parts), "".join(each.reasoning for each in parts)
    return content, reasoning, [(id, name, arguments) for id, name, arguments in calls]


def test_the_answer_of_these_tests_has_every_kind_of_part() -> None:
    assert [(call.name, call.arguments) for call in WHOLE.tool_calls] == [("f", '{"a": "b \\" c"}')]
    assert WHOLE.content
    assert WHOLE.reasoning


@pytest.mark.parametrize("size", [1, 4, 1000])
@pytest.mark.parametrize("cut", range(len(TOKENS) + 1))
def test_over_http_each_part_comes_once(cut: int, size: int) -> None:
    cursor = Cursor()
    pieces = Pieces(cursor, started())
    parts = [piece.delta for event in deltas()[:cut] for piece in pieces.of(event) if isinstance(piece, Speech)]
    again = Pieces(Cursor.parse(str(cursor)), started())
    reasons = []
    for event in (*deltas(size=size), END):
        for piece in again.of(event):
            if isinstance(piece, Speech | Ending):
                parts.append(piece.delta)
            reasons += [piece.reason] if isinstance(piece, Ending) else []
    assert joined(parts) == LISTED
    assert reasons == [FinishReason.TOOL_CALLS]


async def _events(*events: GenerationEvent) -> AsyncIterator[GenerationEvent]:
    for event in events:
        yield event


def _spoken(wire: Any) -> ReplyDelta:
    return ReplyDelta(wire.text, wire.reasoning, tuple(wire.tool_calls))


@pytest.mark.parametrize("cut", range(0, len(TOKENS) + 1, 3))
async def test_over_grpc_each_part_comes_once(cut: int) -> None:
    parts: list[ReplyDelta] = []
    ids: list[int] = []
    async for event in read_events(_events(started(), *deltas()[:cut])):
        if event.HasField("delta"):
            parts.append(_spoken(event.delta))
            ids += event.delta.token_ids
    reason = 0
    async for event in read_events(_events(started(), *deltas(size=5), END), {0: cut}):
        if event.HasField("delta"):
            assert event.delta.first_index == len(ids)
            parts.append(_spoken(event.delta))
            ids += event.delta.token_ids
        elif event.HasField("finished"):
            parts.append(_spoken(event.finished))
            reason = event.finished.finish_reason
    assert joined(parts) == LISTED
    assert len(ids) == len(TOKENS)
    assert reason == inference.FINISH_REASON_TOOL_CALLS


async def test_an_answer_without_a_format_is_content_as_it_was() -> None:
    plain = started(None)
    texts = [event.delta.text async for event in read_events(_events(plain, *deltas(), END)) if event.HasField("delta")]
    assert texts == TOKENS
    pieces = Pieces(Cursor(), plain)
    assert [piece.delta.content for event in deltas() for piece in pieces.of(event) if isinstance(piece, Speech)] == TOKENS


@pytest.mark.parametrize(
    ("format", "reason", "form"),
    [
        (FORMAT, FinishReason.STOP, FinishReason.TOOL_CALLS),
        (FORMAT, FinishReason.LENGTH, FinishReason.LENGTH),
        (FORMAT, FinishReason.CANCELLED, FinishReason.CANCELLED),
        (ReplyFormat("hermes", True, False, ("f",), 1, True), FinishReason.STOP, FinishReason.STOP),
        (ReplyFormat("hermes", True, False, ("g",)), FinishReason.STOP, FinishReason.STOP),
        (None, FinishReason.STOP, FinishReason.STOP),
    ],
)
async def test_an_end_is_tool_calls_only_where_there_are_some(
    format: ReplyFormat | None, reason: FinishReason, form: FinishReason
) -> None:
    answer = await Answer.read(_events(started(format), *deltas(), Finished(0, reason, Usage())))
    assert answer.reason(0, answer.message(0)) is form
