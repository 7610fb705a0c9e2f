"""What the load generator notices about one answer."""

from __future__ import annotations

import struct
from collections.abc import Callable

import pytest

from ryzanstein.lab.bench.router.load.answer_stream import AnswerStream
from ryzanstein.lab.bench.router.scripted.script import WORD, Script, age_s, stamp
from ryzanstein.v1 import inference_pb2 as inference


def framed(**event: object) -> bytes:
    message = inference.StreamChatResponse(event=inference.GenerationEvent(**event)).SerializeToString()  # type: ignore[arg-type]
    return struct.pack(">BI", 0, len(message)) + message


def delta(first_index: int, num_tokens: int = 1, text: str = "") -> bytes:
    ids = [stamp()] * num_tokens
    return framed(delta=inference.GenerationDelta(first_index=first_index, token_ids=ids, text=text or WORD * num_tokens))


def end() -> bytes:
    return framed(finished=inference.GenerationFinished(finish_reason=inference.FINISH_REASON_LENGTH))


def read(tokens: int, *payloads: bytes, problem: str = "") -> AnswerStream:
    ended: list[AnswerStream] = []
    stream = AnswerStream(Script(tokens), ended.append)
    for payload in payloads:
        stream.data(payload)
    stream.ended(problem)
    assert ended == [stream]
    return stream


def test_a_whole_answer_is_counted_and_has_no_problem() -> None:
    stream = read(3, delta(0), delta(1, 2), end())
    assert (stream.tokens, stream.messages, stream.problem) == (3, 2, "")
    assert len(stream.delays_s) == 2
    assert all(0 <= delay < 5 for delay in stream.delays_s)


@pytest.mark.parametrize("cut", range(1, 60, 7))
def test_messages_may_come_in_any_pieces(cut: int) -> None:
    whole = delta(0) + delta(1, 2) + end()
    assert read(3, *(whole[at : at + cut] for at in range(0, len(whole), cut))).problem == ""


@pytest.mark.parametrize(
    ("payloads", "says"),
    [
        (lambda: (delta(0), delta(2), end()), "a wrong index: 2 came after 1"),
        (lambda: (delta(0), delta(0), delta(1), end()), "a wrong index: 0 came after 1"),
        (lambda: (delta(0), delta(1), end()), "tokens are missing: 2 of 3 received"),
        (lambda: (delta(0), delta(1), delta(2)), "no final message"),
        (lambda: (delta(0), delta(1, 2, " word wort"), end()), "a wrong text: at index 1"),
        (lambda: (delta(0), struct.pack(">BI", 0, 2) + b"\xff\xff", delta(1, 2), end()), "cannot be decoded"),
    ],
    ids=["lost", "repeated", "short", "no end", "other text", "garbage"],
)
def test_what_is_wrong_is_noticed(payloads: Callable[[], tuple[bytes, ...]], says: str) -> None:
    assert says in read(3, *payloads()).problem


def test_a_broken_stream_says_how_it_broke() -> None:
    assert read(3, problem="reset: code 8").problem == "reset: code 8"
    assert read(3, delta(0), problem="reset: code 8").problem == "reset: code 8, after 1 tokens"


def test_a_tokens_age_survives_the_wrap_of_the_clock() -> None:
    assert age_s(2**32 - 500_000, 500_000) == pytest.approx(1.0)
