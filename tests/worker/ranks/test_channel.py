import asyncio
import socket
import threading

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ryzanstein.generation.request import SamplingParams
from ryzanstein.worker.engine.messages import CancelGroup, SubmitGroup
from ryzanstein.worker.ranks import channel as channels
from ryzanstein.worker.ranks.channel import AgentChannel, ChannelClosed, FrameSplitter, FrameTooLarge, RankChannel, encode
from ryzanstein.worker.ranks.messages import AgentMessage


@pytest.fixture
def ends():
    pair = socket.socketpair()
    yield RankChannel(pair[0], AgentMessage), RankChannel(pair[1], AgentMessage), pair
    for end in pair:
        end.close()


@given(st.lists(st.binary(max_size=300)), st.integers(1, 50))
def test_frames_come_out_as_they_went_in_however_the_stream_is_cut(bodies, cut):
    stream = b"".join(encode(msgspec.Raw(body)) for body in bodies)
    splitter = FrameSplitter()
    out = [body for i in range(0, len(stream), cut) for body in splitter.feed(stream[i : i + cut])]
    assert out == bodies


def test_messages_keep_their_type_and_order(ends):
    ours, theirs, _ = ends
    sampling = SamplingParams(temperature=0.5, stop=("a", "b"), logit_bias=((3, 1.5),))
    submit = SubmitGroup(3, [1, 2], sampling, 5, [0], [[]], [False], deadline=1.5)
    ours.send(submit)
    ours.send(CancelGroup(3))
    received = theirs.wait()
    while len(received) < 2:
        received += theirs.wait()
    assert received == [submit, CancelGroup(3)]


def test_draining_an_empty_channel_does_not_wait(ends):
    assert ends[0].drain() == []


def test_a_message_larger_than_the_socket_buffer_arrives_whole(ends):
    ours, theirs, _ = ends
    submit = SubmitGroup(1, list(range(500_000)), SamplingParams(), 1, [], [[]], [False])
    sender = threading.Thread(target=ours.send, args=(submit,))
    sender.start()
    assert theirs.wait() == [submit]
    sender.join()


def test_the_other_sides_end_is_seen_when_reading_and_when_writing(ends):
    ours, _, pair = ends
    pair[1].close()
    with pytest.raises(ChannelClosed):
        ours.wait()
    with pytest.raises(ChannelClosed):
        ours.drain()
    with pytest.raises(ChannelClosed):
        ours.send(CancelGroup(1))


def test_a_message_over_the_bound_is_refused_by_the_sender(ends, monkeypatch):
    monkeypatch.setattr(channels, "MAX_FRAME_BYTES", 100)
    with pytest.raises(FrameTooLarge, match="SubmitGroup of"):
        ends[0].send(SubmitGroup(1, list(range(200)), SamplingParams(), 1, [], [[]], [False]))


def test_a_frame_over_the_bound_is_refused_by_the_receiver():
    with pytest.raises(FrameTooLarge):
        list(FrameSplitter().feed(b"\xff\xff\xff\xff"))


async def test_the_agents_side_calls_back_in_order_and_once_at_the_end():
    agent_end, rank_end = socket.socketpair()
    received, closed = [], asyncio.Event()
    agent = AgentChannel(AgentMessage, received.append, closed.set)
    await agent.open(agent_end)
    rank = RankChannel(rank_end, AgentMessage)
    for group in range(100):
        rank.send(CancelGroup(group))
    agent.send(CancelGroup(7))
    assert rank.wait() == [CancelGroup(7)]
    rank_end.close()
    await asyncio.wait_for(closed.wait(), 5)
    assert received == [CancelGroup(group) for group in range(100)]
    agent.send(CancelGroup(8))  # to nobody
