"""The pieces of a streamed answer and their chunks: each choice starts, has content and finishes, once."""

from __future__ import annotations

import json
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from ryzanstein.generation.reply_format import ReplyFormat
from ryzanstein.generation.tokens import Delta, Finished, FinishReason, GenerationEvent, Started, Token, TokenLogprobs, Usage
from ryzanstein.router.faces.openai.answers.chunks import Chunks
from ryzanstein.router.faces.openai.answers.cursor import Cursor
from ryzanstein.router.faces.openai.answers.dialect import ChatDialect, CompletionDialect
from ryzanstein.router.faces.openai.answers.pieces import Ending, Opening, Piece, Pieces, Speech

PLAIN = Started("gen", "demo", "node-0", 5, created=17)
ANSWER = 'Well.\n<tool_call>\n{"name": "f", "arguments": {"a": "b c"}}\n</tool_call>'
CALLING = Started("gen", "demo", "node-0", 5, created=17, reply=ReplyFormat("hermes", tools=("f",)))


def events(text: str, sizes: Sequence[int], *, choice: int = 0, logprobs: bool = False) -> list[GenerationEvent]:
    """A token for each character, in deltas of these sizes, then the end."""
    made: list[GenerationEvent] = []
    first = 0
    for size in [*sizes, len(text)]:
        part = text[first : first + size]
        if part:
            rows = [TokenLogprobs(-0.5, text=each, token_bytes=each.encode()) if logprobs else None for each in part]
            tokens = [Token(ord(each), each, row) for each, row in zip(part, rows, strict=True)]
            made.append(Delta(choice, first, tokens, "node-0"))
        first += size
    return [*made, Finished(choice, FinishReason.STOP, Usage(5, len(text)))]


def pieces_of(started: Started, message: Sequence[GenerationEvent], cursor: Cursor | None = None) -> list[Piece]:
    pieces = Pieces(cursor or Cursor(), started)
    return [piece for event in message for piece in pieces.of(event)]


def content(pieces: Sequence[Piece]) -> str:
    return "".join(piece.delta.content for piece in pieces if isinstance(piece, Speech | Ending))


def arguments(pieces: Sequence[Piece]) -> str:
    return "".join(call.arguments for piece in pieces if isinstance(piece, Speech | Ending) for call in piece.delta.calls)


def test_a_choice_begins_speaks_and_ends() -> None:
    first, *middle, last = pieces_of(PLAIN, events("abcd", [2, 2]))
    assert first == Opening(0)
    assert [piece.delta.content for piece in middle if isinstance(piece, Speech)] == ["ab", "cd"]
    assert isinstance(last, Ending)
    assert last.reason is FinishReason.STOP


def test_choices_that_alternate_keep_their_own_positions() -> None:
    pieces = Pieces(Cursor(), PLAIN)
    ones, twos = events("abc", [1, 1]), events("xyz", [1, 1], choice=1)
    message = [piece for pair in zip(ones, twos, strict=True) for event in pair for piece in pieces.of(event)]
    assert [piece.choice for piece in message if isinstance(piece, Opening)] == [0, 1]
    assert [content([piece for piece in message if piece.choice == choice]) for choice in (0, 1)] == ["abc", "xyz"]
    assert str(pieces.cursor) == "0:3.,1:3."


@given(st.lists(st.integers(1, 9), max_size=12), st.lists(st.integers(1, 9), max_size=12), st.integers(0, len(ANSWER)))
def test_a_reader_that_comes_back_anywhere_gets_each_part_of_a_call_once(before: list[int], after: list[int], cut: int) -> None:
    """The second reader follows at another router, which divides the tokens otherwise."""
    pieces = Pieces(Cursor(), CALLING)
    heard: list[Piece] = []
    for event in events(ANSWER, before):
        if isinstance(event, Delta) and event.first_index < cut:
            heard += pieces.of(event)
    rest = pieces_of(CALLING, events(ANSWER, after), Cursor.parse(str(pieces.cursor)))
    assert content([*heard, *rest]) == "Well."
    assert json.loads(arguments([*heard, *rest])) == {"a": "b c"}
    names = [call.name for piece in [*heard, *rest] if isinstance(piece, Speech | Ending) for call in piece.delta.calls]
    assert [name for name in names if name] == ["f"]
    assert sum(isinstance(piece, Opening) for piece in [*heard, *rest]) == 1
    (end,) = [piece for piece in rest if isinstance(piece, Ending)]
    assert end.reason is FinishReason.TOOL_CALLS


@given(st.integers(0, 6), st.lists(st.integers(1, 3), max_size=6))
def test_rows_follow_the_position_of_the_reader(seen: int, sizes: list[int]) -> None:
    cursor = Cursor.parse(f"0:{seen}" if seen else "")
    pieces = pieces_of(PLAIN, events("abcdef", sizes, logprobs=True), cursor)
    rows = [row.text for piece in pieces if isinstance(piece, Speech | Ending) for row in piece.rows]
    assert "".join(rows) == content(pieces) == "abcdef"[seen:]


def test_a_choice_that_the_reader_saw_ending_does_not_end_again() -> None:
    assert pieces_of(PLAIN, events("ab", [2])[-1:], Cursor.parse("0:2.")) == []


def chunks_of(started: Started, message: Sequence[GenerationEvent], dialect: ChatDialect | CompletionDialect, **more: bool):  # type: ignore[no-untyped-def]
    chunks = Chunks(started, dialect, Cursor(), include_usage=True, **more)
    return [*(chunk for event in message for chunk in chunks.of(event)), *chunks.last()]


def test_chunks_have_an_envelope_and_the_last_one_the_usage() -> None:
    *middle, last = chunks_of(PLAIN, events("abcd", [2, 2]), ChatDialect())
    assert all((chunk["id"], chunk["created"], chunk["usage"]) == ("chatcmpl-gen", 17, None) for chunk in middle)
    assert [choice["delta"] for chunk in middle for choice in chunk["choices"]] == [
        {"role": "assistant", "content": ""},
        {"content": "ab"},
        {"content": "cd"},
        {},
    ]
    assert last["choices"] == []
    assert (last["usage"]["prompt_tokens"], last["usage"]["completion_tokens"]) == (5, 4)


def test_continuous_usage_counts_what_the_reader_has() -> None:
    *middle, last = chunks_of(PLAIN, events("abcd", [1, 3]), CompletionDialect(), continuous=True)
    assert [chunk["usage"]["completion_tokens"] for chunk in middle] == [1, 4, 4]
    assert last["usage"]["completion_tokens"] == 4


def test_a_call_comes_in_deltas_of_which_only_the_first_has_id_and_name() -> None:
    chunks = chunks_of(CALLING, events(ANSWER, [5] * 20), ChatDialect())
    deltas = [each for chunk in chunks for choice in chunk["choices"] for each in choice["delta"].get("tool_calls", ())]
    first, *rest = deltas
    assert (first["index"], first["type"], first["function"]["name"]) == (0, "function", "f")
    assert all(set(each) == {"index", "function"} and set(each["function"]) == {"arguments"} for each in rest)
    assert json.loads("".join(each["function"]["arguments"] for each in deltas)) == {"a": "b c"}
    reasons = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]]
    assert reasons[-1] == "tool_calls"
    assert set(reasons[:-1]) == {None}


@given(
    st.lists(st.text(st.characters(), min_size=1, max_size=8), min_size=1, max_size=5),
    st.sampled_from([ChatDialect(), CompletionDialect()]),
    st.sampled_from([(False, False), (True, False), (True, True)]),
    st.sampled_from(["demo", '"', "\0text\0", "\U0001f600"]),
)
def test_encoded_chunks_are_the_chunks_encoded(texts, dialect, usage, model) -> None:
    """Also for surrogates, line ends, quotes, and a model whose name is the mark of the gap."""
    started = Started("gen", model, "node-0", 5, created=17)
    message = [Delta(i % 2, i // 2, [Token(1, text)], "node-0") for i, text in enumerate(texts)]
    chunks, judge = (Chunks(started, dialect, Cursor(), usage[0], continuous=usage[1]) for _ in range(2))
    for event in [*message, Finished(0, FinishReason.STOP, Usage(5, len(texts)))]:
        assert list(chunks.json_of(event)) == [json.dumps(chunk, separators=(",", ":")) for chunk in judge.of(event)]


def test_encoded_chunks_of_calls_and_log_probabilities_are_the_chunks_encoded() -> None:
    for started, message in ((CALLING, events(ANSWER, [3] * 30)), (PLAIN, events("abcd", [2, 2], logprobs=True))):
        chunks, judge = (Chunks(started, ChatDialect(), Cursor(), False) for _ in range(2))
        for event in message:
            assert list(chunks.json_of(event)) == [json.dumps(chunk, separators=(",", ":")) for chunk in judge.of(event)]
