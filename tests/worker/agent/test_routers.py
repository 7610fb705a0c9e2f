import asyncio
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from ryzanstein import errors
from ryzanstein.adapters import AdapterReport, NodeAdapter
from ryzanstein.cluster import Beat, Load, NodeState
from ryzanstein.errors import Code, RyzansteinError
from ryzanstein.generation.request import AdapterRef
from ryzanstein.generation.tokens import FinishReason, Token, TokenLogprobs, TopLogprob
from ryzanstein.wire.adapters import report_from_wire, report_to_wire
from ryzanstein.worker.agent import routers
from ryzanstein.worker.agent.routers import RouterLink
from ryzanstein.worker.tuning import LinkBounds


@pytest.fixture
def link():
    return RouterLink("router-t", LinkBounds(rows=100, bytes=10_000))


async def next_frame(frames):
    return await asyncio.wait_for(anext(frames), 2)


async def test_what_gathers_before_a_write_becomes_one_frame_of_columns(link):
    link.accept(1, 12)
    for index in range(3):
        link.add_row(1, 0, index, Token(100 + index, "abc"[index]))
        link.end_step(index + 5)
    link.finish(1, 0, FinishReason.STOP, 8)
    output = (await next_frame(link.frames())).output
    assert output.step == 7
    assert [(a.handle, a.prompt_tokens) for a in output.accepted] == [(1, 12)]
    assert (list(output.handle), list(output.index)) == ([1, 1, 1], [0, 1, 2])
    assert (list(output.token_id), list(output.text)) == ([100, 101, 102], ["a", "b", "c"])
    assert [(f.choice, f.reason, f.cached_prompt_tokens) for f in output.finished] == [(0, FinishReason.STOP, 8)]


async def test_nothing_is_sent_twice(link):
    frames = link.frames()
    link.add_row(1, 0, 0, Token(1, "a"))
    await next_frame(frames)
    link.add_row(1, 0, 1, Token(2, "b"))
    assert list((await next_frame(frames)).output.index) == [1]


async def test_log_probabilities_name_their_row(link):
    link.add_row(1, 0, 0, Token(1, "a"))
    link.add_row(2, 0, 0, Token(2, "b", TokenLogprobs(-0.5, (TopLogprob(2, "b", -0.5), TopLogprob(3, "c", -1.5)))))
    output = (await next_frame(link.frames())).output
    assert list(output.logprob_row) == [1]
    assert [top.token_id for top in output.logprobs[0].top] == [2, 3]


async def test_only_the_newest_beat_is_sent_and_after_the_output(link):
    link.beat(Beat(sequence=1))
    link.add_row(1, 0, 0, Token(1, "a"))
    link.beat(Beat(sequence=2, state=NodeState.READY))
    frames = link.frames()
    assert (await next_frame(frames)).HasField("output")
    assert (await next_frame(frames)).beat.sequence == 2


async def test_only_the_newest_answer_to_a_beat_is_sent_and_before_everything_else(link):
    link.add_row(1, 0, 0, Token(1, "a"))
    link.beat(Beat(sequence=1))
    link.acknowledge(6)
    link.acknowledge(7)
    frames = link.frames()
    assert (await next_frame(frames)).ack.sequence == 7
    assert (await next_frame(frames)).HasField("output")
    assert (await next_frame(frames)).HasField("beat")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(anext(frames), 0.05)


async def test_a_failure_carries_what_a_status_would(link):
    link.fail(4, errors.context_too_long(10, 20, 25), node_fault=False)
    link.fail(5, errors.not_found("model", "m"), node_fault=False)
    failed, missing = (await next_frame(link.frames())).output.failed
    assert (failed.handle, failed.code, failed.reason) == (4, Code.INVALID_ARGUMENT, "CONTEXT_TOO_LONG")
    assert failed.metadata["context_length"] == "25"
    assert missing.metadata["model"] == "m"


@pytest.mark.parametrize("text", ["a", "x" * 200], ids=["rows", "bytes"])
async def test_a_router_that_does_not_read_is_cut_off(link, text):
    added = 0
    while not link.closed:
        link.add_row(1, 0, added, Token(1, text))
        added += 1
    assert added <= 101
    link.add_row(1, 0, added, Token(1, text))
    with pytest.raises(RyzansteinError, match="reads too slowly") as caught:
        await next_frame(link.frames())
    assert (caught.value.code, caught.value.reason, link.overflowed) == (Code.RESOURCE_EXHAUSTED, "LINK_OVERFLOW", True)


async def test_failures_that_nobody_reads_are_bounded_too(link):
    for handle in range(200):
        link.fail(handle, errors.deadline_exceeded(), node_fault=False)
    assert link.overflowed


async def test_closing_ends_a_waiting_writer(link):
    waiting = asyncio.create_task(anext(link.frames(), "ended"))
    await asyncio.sleep(0)
    link.close()
    assert await asyncio.wait_for(waiting, 2) == "ended"


async def test_a_link_that_ends_sends_what_waits_first(link):
    frames = link.frames()
    link.add_row(1, 0, 0, Token(1, "a"))
    await next_frame(frames)
    link.add_row(1, 0, 1, Token(2, "b"))  # while the frame before it is being written
    link.finish(1, 0, FinishReason.STOP, 0)
    link.end()
    output = (await next_frame(frames)).output
    assert (list(output.index), len(output.finished)) == ([1], 1)
    with pytest.raises(StopAsyncIteration):
        await next_frame(frames)
    assert link.closed


def adapter(name, content, *, resident=False):
    return NodeAdapter(AdapterRef(name, content * 32), 1, resident)


async def test_reports_of_adapters_that_gather_are_as_many_as_there_are_adapters(link):
    whole = report_to_wire(AdapterReport((adapter("a", b"1"), adapter("b", b"2")), True))
    link.report(whole)
    for turn in range(50):
        link.report(report_to_wire(AdapterReport((adapter("a", b"1", resident=turn % 2 == 0),))))
    link.report(report_to_wire(AdapterReport((adapter("b", b"3"),), False, (AdapterRef("b", b"2" * 32),))))
    report = report_from_wire((await next_frame(link.frames())).adapters)
    assert (report.whole, report.replaced) == (True, (AdapterRef("b", b"2" * 32),))
    assert set(report.adapters) == {adapter("a", b"1"), adapter("b", b"3")}
    assert len(whole.adapters) == 2, "the message is that of other links too"


@pytest.fixture
def quiet(monkeypatch):
    """A link of a router that had no work here for a while, and its frames."""
    link, clock = RouterLink("router-t", LinkBounds(rows=100, bytes=10_000), 2.0), [100.0]
    monkeypatch.setattr(routers, "time", SimpleNamespace(monotonic=lambda: clock[0], time=time.time))
    link._worked_at = link._beaten_at = clock[0]
    link.clock = clock
    clock[0] += routers.QUIET_AFTER_S
    link.beat(READY)
    return link


READY = Beat(sequence=1, state=NodeState.READY, load=Load(running=1, capacity=4))


async def sent(link):
    """What is sent now."""
    frames = link.frames()
    try:
        async with asyncio.timeout(0.05):
            return await anext(frames)
    except TimeoutError:
        return None
    finally:
        await frames.aclose()


async def test_a_quiet_link_sends_what_is_new_and_what_it_is_asked_for(quiet):
    first = (await sent(quiet)).beat
    assert (first.quiet, first.sequence) == (True, 1), "the router must know that the next one takes its time"
    for sequence in range(2, 5):
        quiet.clock[0] += 0.5
        quiet.beat(replace(READY, sequence=sequence, load=Load(running=sequence - 1, capacity=4)))
        assert await sent(quiet) is None
    quiet.acknowledge(7)
    answer = await sent(quiet)
    assert (answer.beat.sequence, answer.beat.ack, answer.beat.quiet) == (4, 7, True), "one frame for both"
    assert await sent(quiet) is None
    for news in (
        replace(READY, load=Load(running=4, capacity=4)),
        READY,
        replace(READY, state=NodeState.DRAINING, reason="asked to"),
        replace(READY, other_models=("second",)),
    ):
        quiet.beat(news)
        assert (await sent(quiet)).beat.quiet
    quiet.clock[0] += 2.4
    quiet.beat(replace(READY, other_models=("second",)))
    assert await sent(quiet) is None
    quiet.clock[0] += 0.2
    quiet.beat(replace(READY, other_models=("second",)))
    assert (await sent(quiet)).beat.quiet, "the router's beats do not arrive: it hears of this node all the same"


async def test_work_ends_the_quiet_at_once_and_for_a_while(quiet):
    await sent(quiet)
    quiet.prepare(1)
    assert not (await sent(quiet)).beat.quiet
    quiet.prepared(1)
    for _ in range(int(routers.QUIET_AFTER_S) - 1):
        quiet.clock[0] += 1.0
        quiet.beat(READY)
        assert not (await sent(quiet)).beat.quiet
    quiet.clock[0] += 1.0
    quiet.beat(READY)
    assert (await sent(quiet)).beat.quiet


async def test_a_link_of_a_router_that_does_not_ask_for_quiet_has_none(link):
    link._worked_at -= 1000
    for sequence in range(1, 4):
        link.beat(Beat(sequence=sequence))
        link.acknowledge(sequence)
        frames = link.frames()
        assert (await next_frame(frames)).ack.sequence == sequence
        assert not (await next_frame(frames)).beat.quiet
