"""The events of a stream, whatever the pieces in which its bytes come."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ryzanstein.worker.engines.remote.http.faults import EngineProtocolError
from ryzanstein.worker.engines.remote.http.sse import EventReader

STREAM = b"".join(
    (
        b': hello\n\ndata: {"a": 1}\n\n',
        b'event: x\nid: 7\ndata:{"b":\ndata:  2}\r\n\r\n\n\n',
        b"data\n\ndata: [DONE]\n\nretry: 5\n\ndata: cut",
    )
)
EVENTS = [b'{"a": 1}', b'{"b":\n 2}', b"", b"[DONE]"]


@given(st.lists(st.integers(0, len(STREAM)), max_size=20))
def test_the_division_into_chunks_does_not_matter(cuts: list[int]) -> None:
    places = [0, *sorted(cuts), len(STREAM)]
    reader = EventReader()
    events = [event for begin, end in pairwise(places) for event in reader.feed(STREAM[begin:end])]
    assert events == EVENTS


@given(st.binary(max_size=500))
def test_garbage_ends_nothing(garbage: bytes) -> None:
    reader = EventReader()
    reader.feed(garbage)
    assert reader.feed(b"\n\ndata: x\n\n")[-1] == b"x"


@pytest.mark.parametrize(
    "stream",
    [b"data: " + b"x" * 100, b"data: " + b"x" * 100 + b"\n", b": " + b"x" * 100, b"data: 0123456789\n" * 7, b"x" * 101],
    ids=["endless line", "long line", "endless comment", "endless event", "no field"],
)
@pytest.mark.parametrize("size", [1, 7, 1000])
def test_an_event_that_is_too_long_is_refused_before_it_ends(stream: bytes, size: int) -> None:
    reader = EventReader(max_event_bytes=100)
    with pytest.raises(EngineProtocolError, match="more than 100 bytes"):
        [reader.feed(stream[begin : begin + size]) for begin in range(0, len(stream), size)]


def test_many_short_events_are_within_the_bound() -> None:
    reader = EventReader(max_event_bytes=100)
    assert len(reader.feed(b"data: 0123456789\n\n" * 1000)) == 1000
