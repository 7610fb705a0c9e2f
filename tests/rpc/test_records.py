"""What a message consists of is counted as its parser would see it, and in bounded time."""

from __future__ import annotations

import time

import pytest
from google.protobuf.message import DecodeError, Message
from hypothesis import example, given
from hypothesis import strategies as st

from ryzanstein.rpc.reading import MAX_RECORDS, MalformedError, TooManyRecordsError, check_records, shape_of
from ryzanstein.v1 import inference_pb2 as inference
from ryzanstein.v1 import worker_pb2 as worker

CHAT = shape_of(inference.ChatRequest.DESCRIPTOR)
COMPLETE = shape_of(inference.CompleteRequest.DESCRIPTOR)
CONNECT = shape_of(worker.ConnectRequest.DESCRIPTOR)


def counted(data: bytes, shape: object = CHAT) -> int:
    """By bisection: the least bound that the message is within."""
    low, high = 0, 2 * len(data) + 2
    while low < high:
        bound = (low + high) // 2
        try:
            # Small messages pass unseen, so that this one is made large by an unknown text behind it, which is one record more.
            check_records(data + b"\xfa\x7f" + _varint(4 * high) + bytes(4 * high), shape, bound)  # type: ignore[arg-type]
            high = bound
        except TooManyRecordsError:
            low = bound + 1
    return low - 1


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes((*out, value))


def records_of(message: Message) -> int:
    """The same by the parsed message."""
    total = 0
    for field, value in message.ListFields():
        values = value if field.is_repeated else [value]
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            total += 3 * len(value)
        elif field.message_type is not None:
            total += sum(1 + records_of(each) for each in values)
        elif field.is_repeated and field.type not in (field.TYPE_STRING, field.TYPE_BYTES):
            total += 1
        else:
            total += len(values)
    return total


@given(
    st.lists(st.tuples(st.integers(0, 3), st.text(max_size=300)), max_size=20),
    st.lists(st.text(min_size=1, max_size=200), max_size=16),
    st.dictionaries(st.integers(1, 2**32 - 1), st.floats(1, 100, width=32), max_size=5),
)
def test_records_are_counted_at_every_depth(messages: list[tuple[int, str]], stop: list[str], bias: dict[int, float]) -> None:
    chat = inference.ChatRequest(
        model="m",
        messages=[inference.Message(role=role, content=text) for role, text in messages],  # type: ignore[arg-type]
    )
    chat.sampling.stop.extend(stop)
    chat.sampling.logit_bias.update(bias)
    assert counted(chat.SerializeToString()) == records_of(chat)


def test_packed_numbers_count_by_their_bytes() -> None:
    prompt = inference.CompleteRequest(token_ids=inference.TokenIds(ids=[100] * 6800))
    assert counted(prompt.SerializeToString(), COMPLETE) == 2 + 10


@pytest.mark.parametrize("num_tokens", [32_768, 1_000_000])
def test_a_long_prompt_of_tokens_passes(num_tokens: int) -> None:
    request = inference.CompleteRequest(token_ids=inference.TokenIds(ids=[200_000] * num_tokens))
    check_records(request.SerializeToString(), COMPLETE)


def test_more_packed_numbers_than_the_bound_are_refused_also_at_the_very_end() -> None:
    request = inference.CompleteRequest(token_ids=inference.TokenIds(ids=[1] * 12_000_000))
    with pytest.raises(TooManyRecordsError, match="token_ids"):
        check_records(request.SerializeToString(), COMPLETE)


def test_the_largest_request_within_the_documented_bounds_passes() -> None:
    chat = inference.ChatRequest(
        messages=[inference.Message(role=inference.ROLE_USER, content="x" * 480)] * 2048, model="m", user="u", session_id="s"
    )
    chat.sampling.stop.extend(["stop" * 60] * 16)
    chat.sampling.stop_token_ids.extend([2**32 - 1] * 64)
    chat.sampling.logit_bias.update(dict.fromkeys(range(1024), 1.0))
    check_records(chat.SerializeToString(), CHAT)


@pytest.mark.parametrize(
    ("data", "field"),
    [
        (b"\x12\x00" * 2_000_000, "messages"),
        (b"\x12\x04\x08\x02\x12\x00" * 600_000, "messages"),
        (b"\x92\x80\x00\x80\x00" * 600_000, "messages"),
        (b"\x30\x01" * 2_000_000, "priority"),
        (inference.ChatRequest(sampling={"stop": [""] * 1_000_000}).SerializeToString(), "sampling"),
        (inference.ChatRequest(sampling={"logit_bias": dict.fromkeys(range(100000), 1)}).SerializeToString(), "sampling"),
        (b"\xa2\x06\x00" * 1_000_000, ""),
    ],
    ids=["empty", "small", "long_tags", "same_number", "stop", "bias", "unknown"],
)
def test_too_many_records_are_found_early_and_named(data: bytes, field: str) -> None:
    began = time.thread_time()
    with pytest.raises(TooManyRecordsError) as caught:
        check_records(data, CHAT)
    assert (caught.value.field, caught.value.bound) == (field, MAX_RECORDS)
    assert time.thread_time() - began < 0.2, "the rest is not read"


@given(st.binary(min_size=1, max_size=64), st.integers(0, 2))
@example(b"\x00\x00\x00\x00\x00\x002\x80", 0)
def test_what_the_parser_takes_is_not_called_malformed(data: bytes, which: int) -> None:
    """Groups apart, which proto3 does not have."""
    kind, shape = ((inference.ChatRequest, CHAT), (inference.CompleteRequest, COMPLETE), (worker.ConnectRequest, CONNECT))[
        which
    ]
    data += b"\xfa\x7f\xc0\x02" + bytes(320)  # an unknown text, so that it is large enough to be looked at
    try:
        check_records(data, shape, 160)
        seen = True
    except TooManyRecordsError:
        pytest.fail("it has at most 64 records")
    except MalformedError:
        seen = False
    try:
        kind.FromString(data)
        parsed = True
    except DecodeError:
        parsed = False
    assert seen or not parsed or any(byte & 7 == 3 for byte in data)


@pytest.mark.parametrize(
    "data",
    [
        b"\x12\x05ab" + bytes(0),
        b"\x80" * 200_000,
        b"\x12" + b"\xff" * 9 + b"\x01" + bytes(100_000),
        b"\x0b" * 100_000,
        b"\x12\x04\x12\x09xx" + b"\x12\x00" * 1000 + b"\x0a",
    ],
    ids=["cut", "endless", "huge_length", "groups", "inner_over_outer"],
)
def test_a_torn_message_is_malformed_to_the_scan_and_to_the_parser(data: bytes) -> None:
    with pytest.raises(DecodeError):
        inference.ChatRequest.FromString(data)
    with pytest.raises(MalformedError):
        check_records(data, CHAT, len(data) // 2 - 1)
