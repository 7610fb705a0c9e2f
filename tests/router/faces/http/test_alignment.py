"""Rows beside the text at every way of cutting it into tokens, with stop strings wherever they fall.

Tokens are made as a node makes them: whole characters only, and nothing of what may begin a stop string.
"""

from __future__ import annotations

import codecs
import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ryzanstein.generation.prompts import Message, Role
from ryzanstein.generation.tokens import Delta, Finished, FinishReason, Started, Token, TokenLogprobs, TopLogprob, Usage
from ryzanstein.router.faces.http.stream import ChunkWriter
from ryzanstein.router.faces.openai.answers.alignment import Alignment, LogprobRow
from ryzanstein.router.faces.openai.answers.cursor import Cursor, cursor_of
from ryzanstein.router.faces.openai.answers.dialect import AnswerForm, ChatDialect, CompletionDialect
from ryzanstein.worker.text.choice import StopScanner

CHARACTERS = "abc \u00e4\u20ac\U0001f44b"


def tokens_of(pieces: list[bytes], stop: list[str]) -> list[Token]:
    """One token a piece, up to the one that completes a stop string."""
    decoder, scanner = codecs.getincrementaldecoder("utf-8")("replace"), StopScanner(stop)
    tokens = []
    for i, piece in enumerate(pieces):
        text = scanner.push(decoder.decode(piece))
        if i == len(pieces) - 1 and not scanner.stopped:
            text += scanner.push(decoder.decode(b"", final=True)) + scanner.flush()
        own = piece.decode("utf-8", "replace")
        top = (TopLogprob(i, own, -0.5, piece),)
        tokens.append(Token(i, text, TokenLogprobs(-0.5, top, own, piece)))
        if scanner.stopped:
            break
    return tokens


def rows_of(tokens: list[Token]) -> list[LogprobRow]:
    alignment = Alignment()
    return [row for token in tokens for row in alignment.push(token)] + list(alignment.end())


@st.composite
def cut_texts(draw: st.DrawFn) -> list[bytes]:
    data = draw(st.text(CHARACTERS, min_size=1, max_size=12)).encode()
    cuts = sorted(draw(st.sets(st.integers(1, max(1, len(data) - 1)), max_size=len(data))))
    return [data[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(data)], strict=True)]


stops = st.lists(st.text(CHARACTERS, min_size=1, max_size=4), max_size=3)


@given(pieces=cut_texts(), stop=stops)
@example(pieces=[b"x", b"\xc3", b"\xa4"], stop=["\u00e4"])
@example(pieces=[b"xa", b"b", b"cz"], stop=["abc"])
@settings(max_examples=500)
def test_the_bytes_of_the_rows_are_the_text(pieces: list[bytes], stop: list[str]) -> None:
    tokens = tokens_of(pieces, stop)
    rows = rows_of(tokens)
    content = "".join(token.text for token in tokens)
    assert b"".join(row.kept for row in rows) == content.encode()
    assert all(row.kept in row.logprobs.token_bytes for row in rows)
    offsets = [len(b"".join(row.kept for row in rows[:i]).decode("utf-8", "ignore")) for i in range(len(rows))]
    assert [row.offset for row in rows] == offsets


@pytest.mark.parametrize("text", ["one, two; three", "\u00e4\u20ac\U0001f44b!"])
def test_at_every_split_of_a_stop_string(text: str) -> None:
    data = text.encode()
    for begin in range(len(text)):
        for end in range(begin + 1, len(text) + 1):
            for cut in range(1, len(data)):
                tokens = tokens_of([data[:cut], data[cut:]], [text[begin:end]])
                expected = text[: text.index(text[begin:end])]
                assert "".join(token.text for token in tokens) == expected
                assert b"".join(row.kept for row in rows_of(tokens)) == expected.encode()


@given(pieces=cut_texts(), stop=stops)
@settings(max_examples=200)
def test_no_row_is_taken_back(pieces: list[bytes], stop: list[str]) -> None:
    """A stream can be read at any moment: what was written is a part of what is written in the end."""
    tokens, alignment, written = tokens_of(pieces, stop), Alignment(), b""
    content = "".join(token.text for token in tokens).encode()
    for token in tokens:
        written += b"".join(row.kept for row in alignment.push(token))
        assert content.startswith(written)


def test_bytes_that_are_no_text_are_their_own() -> None:
    tokens = tokens_of([b"a\xff", b"\xe2\x82", b"b", b"\xf0"], [])
    assert [row.kept for row in rows_of(tokens)] == [b"a\xff", b"\xe2\x82", b"b", b"\xf0"]
    assert "".join(token.text for token in tokens) == "a\ufffd\ufffdb\ufffd"


def test_a_special_token_has_a_row_and_no_bytes() -> None:
    end = Token(2, "", TokenLogprobs(-0.1, (), "</s>", b""))
    assert [(row.text, row.kept) for row in rows_of([*tokens_of([b"a"], []), end])] == [("a", b"a"), ("</s>", b"")]


def test_a_node_that_says_no_bytes_is_believed_its_text() -> None:
    tokens = [Token(1, "a", TokenLogprobs(-0.5)), Token(2, "", TokenLogprobs(-0.5)), Token(3, "bc", TokenLogprobs(-0.5))]
    assert [(row.text, row.kept, row.offset) for row in rows_of(tokens)] == [("a", b"a", 0), ("", b"", 1), ("bc", b"bc", 1)]


def chunks_of(data: bytes) -> tuple[str, list[dict], list[str]]:
    """Text, rows and the ids of events."""
    text, rows, ids = "", [], []
    for event in data.decode().split("\n\n")[:-1]:
        ids.append(event.split("\n")[0].removeprefix("id: "))
        (choice,) = json.loads(event.split("data: ", 1)[1])["choices"]
        text += choice["delta"].get("content", "")
        rows += (choice["logprobs"] or {}).get("content", [])
    return text, rows, ids


@given(pieces=cut_texts(), stop=stops, data=st.data())
@settings(max_examples=200)
def test_a_reader_that_comes_back_gets_each_row_once(pieces: list[bytes], stop: list[str], data: st.DataObject) -> None:
    tokens, started = tokens_of(pieces, stop), Started("g", "m", "n", 1)
    deltas = [Delta(0, i, (token,), "n") for i, token in enumerate(tokens)]
    end = Finished(0, FinishReason.STOP, Usage())
    first = ChunkWriter(started, AnswerForm(ChatDialect()), Cursor())
    sent = b"".join(first.write(event) for event in (*deltas, end)).split(b"\n\n")[:-1]
    before = b"".join(event + b"\n\n" for event in sent[: data.draw(st.integers(1, len(sent)))])
    # The id that a reader comes back with is of the last event that it was sent: tokens that sent nothing come again.
    second = ChunkWriter(started, AnswerForm(ChatDialect()), cursor_of(chunks_of(before)[2][-1], "g"))
    after = b"".join(second.write(event) for event in (*deltas, end))
    text, rows, _ = chunks_of(before + after)
    content = "".join(token.text for token in tokens)
    assert text == content
    assert b"".join(bytes(row["bytes"]) for row in rows) == content.encode()


def test_a_completion_has_the_same_rows_with_offsets() -> None:
    tokens = tokens_of([b"one ", b"t\xc3", b"\xa4", b"xy"], ["y"])
    body = CompletionDialect().answer(0, Message(Role.ASSISTANT, "one t\u00e4x"), rows_of(tokens), FinishReason.STOP)
    assert body["logprobs"]["tokens"] == ["one ", "t\ufffd", "\ufffd", "x"]
    assert body["logprobs"]["text_offset"] == [0, 4, 5, 6]


async def test_an_answer_without_text_has_empty_lists_where_log_probabilities_were_asked_for(http, face, monkeypatch):
    token = Token(2, "")
    monkeypatch.setattr("tests.router.faces.http.conftest._token", lambda index, text, logprobs: token)
    body = {"model": "echo", "messages": [{"role": "user", "content": "one"}]}
    for asked, form in (({}, None), ({"logprobs": True}, {"content": [], "refusal": None})):
        token = Token(2, "", TokenLogprobs(-0.5, (), token_bytes=b"#") if asked else None)
        (choice,) = (await http.post("/v1/chat/completions", json=body | asked)).json()["choices"]
        assert choice["logprobs"] == form
    (choice,) = (await http.post("/v1/completions", json={"model": "echo", "prompt": "one", "logprobs": 1})).json()["choices"]
    assert choice["logprobs"] == {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
