"""The state machine under losses, refusals, repeats and gaps in any order: each index once, or an error that keeps its part."""

from __future__ import annotations

import random
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from ryzanstein import errors
from ryzanstein.client.errors import ClientError
from ryzanstein.client.events import Ended, Text
from ryzanstein.client.following.flow import Attach, Begin, Done, Flow, Wait
from ryzanstein.client.following.retries import Bounds
from ryzanstein.client.following.routers import RouterChoice
from ryzanstein.errors import Code, RyzansteinError
from ryzanstein.v1 import inference_pb2 as pb

NUM = 12
FAULTS = ("none", "lost", "silent", "full", "moved", "paused", "unknown", "end", "gap", "repeat", "other", "internal", "busy")
ERRORS = {
    "lost": RyzansteinError("reset", Code.UNAVAILABLE, ""),
    "silent": RyzansteinError("left", Code.CANCELLED, ""),
    "full": errors.queue_full(9, 9, 0.2),
    "moved": errors.unavailable("GENERATION_MOVED", "moved", 0.1),
    "paused": errors.unavailable("GENERATION_PAUSED", "paused", 0.1),
    "unknown": errors.not_found("generation", "g"),
    "internal": RyzansteinError("broken", Code.INTERNAL, "INTERNAL"),
    "busy": RyzansteinError("busy", Code.ABORTED, "SESSION_BUSY", retry_after_s=0.5),
}


def delta(choice: int, index: int) -> pb.GenerationEvent:
    return pb.GenerationEvent(delta=pb.GenerationDelta(choice=choice, first_index=index, token_ids=[index], text=f"{index},"))


class Script:
    """A driver without IO, and the routers that it speaks to. Each stream has the next of the faults, after some events."""

    def __init__(self, flow: Flow, num_choices: int, faults: list[tuple[str, int]]) -> None:
        self.flow, self.num_choices, self.faults = flow, num_choices, faults
        self.now, self.events, self.begins = 0.0, [], 0

    def run(self) -> ClientError | None:
        for _ in range(2000):
            try:
                step = self.flow.next(self.now)
            except ClientError as error:
                return error
            match step:
                case Done():
                    return None
                case Wait(seconds):
                    assert seconds > 0
                    self.now += seconds
                case _:
                    self._stream(step)
        raise AssertionError("it does not end")

    def _stream(self, step: Begin | Attach) -> None:
        fault, after = self.faults.pop(0) if self.faults else ("none", 0)
        first = dict(step.request.from_index) if isinstance(step, Attach) else {}
        self.begins += isinstance(step, Begin)
        sent = [pb.GenerationEvent(started=pb.GenerationStarted(generation_id="g", node_id="a"))]
        for index in range(NUM):
            sent += [delta(choice, index) for choice in range(self.num_choices) if index >= first.get(choice, 0)]
        ends = pb.FINISH_REASON_STOP
        sent += [
            pb.GenerationEvent(finished=pb.GenerationFinished(choice=choice, finish_reason=ends))
            for choice in range(self.num_choices)
        ]
        cut = sent if fault == "none" else sent[:after]
        if fault == "gap":
            cut = [*cut, delta(0, NUM + 3)]
        if fault == "repeat":
            cut = [*cut, *(each for each in cut if each.HasField("delta"))]
        if fault == "other":
            cut = [pb.GenerationEvent(started=pb.GenerationStarted(generation_id="another"))] if first else cut
        for event in cut:
            self.now += 0.01
            self.events += self.flow.got(event, self.now)
            if not self.flow.reading:
                return
        self.now += 0.01
        if fault in ERRORS:
            self.flow.lost(ERRORS[fault], self.now)
        else:
            self.flow.ended(self.now)


@given(
    st.lists(st.tuples(st.sampled_from(FAULTS), st.integers(0, 3 * NUM)), max_size=30),
    st.integers(1, 3),
    st.integers(1, 3),
    st.one_of(st.none(), st.floats(0.5, 20.0)),
    st.integers(0, 2**20),
)
def test_each_index_comes_once_or_there_is_an_error(
    faults: list[Any], num_choices: int, num_routers: int, deadline: float | None, seed: int
) -> None:
    rng = random.Random(seed)
    routers = RouterChoice([f"r{number}" for number in range(num_routers)], rng)
    flow = Flow(routers, Bounds(deadline), num_choices=num_choices, rng=rng, now=0.0)
    script = Script(flow, num_choices, list(faults))
    error = script.run()
    for choice in range(num_choices):
        indices = [event.first_index for event in script.events if isinstance(event, Text) and event.choice == choice]
        assert indices == list(range(len(indices)))
        assert flow.answer.choices[choice].token_ids == indices
        assert sum(isinstance(event, Ended) and event.choice == choice for event in script.events) <= 1
        if error is None:
            assert len(indices) == NUM
            assert flow.answer.choices[choice].finish_reason == "stop"
    if error is not None:
        assert error.partial is flow.answer
    if deadline is not None:
        assert script.now <= deadline + 1.5, "waits end with the deadline"
    assert script.begins <= len(faults) + 1


def test_a_cancelled_flow_ends_where_its_stream_does() -> None:
    flow = Flow(RouterChoice(["r"], random.Random(0)), Bounds(), now=0.0)
    assert isinstance(flow.next(0.0), Begin)
    flow.got(pb.GenerationEvent(started=pb.GenerationStarted(generation_id="g")), 0.1)
    flow.cancel()
    flow.got(delta(0, 0), 0.2)
    flow.lost(ERRORS["lost"], 0.3)
    assert isinstance(flow.next(0.3), Done)
    assert flow.answer.finish_reason == "cancelled"
    assert flow.answer.token_ids == [0]


def test_routers_that_fail_are_avoided_for_longer_each_time() -> None:
    routers = RouterChoice(["a", "b", "a"], random.Random(1))
    assert len(routers.addresses) == 2
    first, second = routers.addresses
    routers.failed(first, 0.0, "refused")
    assert routers.current(0.1) == second
    assert routers.current(5.0) == second, "it stays where it is well"
    routers.failed(second, 5.0, "refused")
    assert routers.current(5.1) == first
    routers.failed(first, 5.2, "refused")
    assert routers.current(5.3) == second, "all are avoided: the one that is free first"
    routers.answered(second)
    assert routers.failures == {first: "refused"}


def test_a_text_is_whole_whenever_it_is_looked_at() -> None:
    flow = Flow(RouterChoice(["r"], random.Random(0)), Bounds(), now=0.0)
    flow.next(0.0)
    flow.got(pb.GenerationEvent(started=pb.GenerationStarted(generation_id="g", node_id="a")), 0.0)
    for index in range(1000):
        flow.got(delta(0, index), 0.0)
        assert not index % 100 or flow.answer.text.endswith(f"{index},")
    assert flow.answer.text == "".join(f"{index}," for index in range(1000))
    assert flow.answer.parts[0].end == len(flow.answer.text)


def test_a_piece_of_a_call_that_never_began_breaks_the_protocol() -> None:
    flow = Flow(RouterChoice(["r"], random.Random(0)), Bounds(), now=0.0)
    flow.next(0.0)
    flow.got(pb.GenerationEvent(started=pb.GenerationStarted(generation_id="g", node_id="a")), 0.0)
    odd = pb.GenerationDelta(first_index=0, token_ids=[0])
    odd.tool_calls.add(index=5, arguments="{")
    flow.got(pb.GenerationEvent(delta=odd), 0.0)
    assert not flow.reading
