"""A load against routers that answer as a script says: times, omission, verdicts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from ryzanstein.errors import RyzansteinError
from ryzanstein.lab.clients.transport import RouterAddress
from ryzanstein.lab.load.arrivals import constant
from ryzanstein.lab.load.objectives import ObjectiveError, Objectives
from ryzanstein.lab.load.page import page
from ryzanstein.lab.load.report import Window, document, flawless, tables
from ryzanstein.lab.load.run import LoadBounds, LoadRun
from ryzanstein.lab.load.workload import Shape, conversations
from ryzanstein.v1 import inference_pb2 as pb
from ryzanstein.v1 import inference_pb2_grpc

Script = Callable[[int, Any], AsyncIterator[pb.StreamChatResponse]]
SHAPE = Shape(num_input=8, num_output=4, temperature=0.0)


class Scripted(inference_pb2_grpc.InferenceServiceServicer):
    """Answers the n-th request, from 0, as the script says."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self.num_requests = 0
        self.came = asyncio.Condition()

    async def StreamChat(self, request: Any, context: Any) -> AsyncIterator[pb.StreamChatResponse]:
        number, self.num_requests = self.num_requests, self.num_requests + 1
        async with self.came:
            self.came.notify_all()
        async for response in self._script(number, context):
            yield response


def event(**kind: Any) -> pb.StreamChatResponse:
    return pb.StreamChatResponse(event=pb.GenerationEvent(**kind))


async def answer(tokens: list[int], prompt_tokens: int = 12) -> AsyncIterator[pb.StreamChatResponse]:
    yield event(started=pb.GenerationStarted(generation_id="g", node_id="node-0", prompt_tokens=prompt_tokens))
    for index, token in enumerate(tokens):
        yield event(delta=pb.GenerationDelta(first_index=index, token_ids=[token], text="x", node_id="node-0"))
    usage = pb.Usage(prompt_tokens=prompt_tokens, completion_tokens=len(tokens))
    yield event(finished=pb.GenerationFinished(finish_reason=pb.FINISH_REASON_LENGTH, usage=usage))


@asynccontextmanager
async def serving(script: Script) -> AsyncIterator[tuple[Scripted, RouterAddress]]:
    server, service = grpc.aio.server(), Scripted(script)
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield service, RouterAddress(f"127.0.0.1:{port}", "127.0.0.1", 1)
    finally:
        await server.stop(None)


def same(_: int, __: Any) -> AsyncIterator[pb.StreamChatResponse]:
    return answer([1, 2, 3, 4])


async def test_a_closed_loop_asks_as_often_as_it_may_and_finds_nothing() -> None:
    async with serving(same) as (service, router):
        run = LoadRun([router], LoadBounds(num_requests=20))
        await run.closed(conversations(SHAPE, 2, 0), 4)
    figures = document(run, Window(0.0, run.ended - run.started), Objectives(ttft_s=5.0))
    assert service.num_requests == 20
    assert figures["requests"] == {"counted": 20, "complete": 20, "refused": 0, "failed": 0, "resumed": 0, "moved": 0}
    assert flawless(figures["verdict"])
    assert figures["objective"]["met"] == 1.0
    assert figures["nodes"] == {"node-0": 20}
    assert sum(each["tokens"] for each in figures["seconds"]) == 80
    assert len(tables(figures)) == 2


async def test_the_time_that_a_request_waited_to_be_sent_counts() -> None:
    """One request at a time may be open and the first takes a second: on their own, those behind it are fast."""

    async def first_is_slow(number: int, _: Any) -> AsyncIterator[pb.StreamChatResponse]:
        if number == 0:
            await asyncio.sleep(1.0)
        async for response in answer([1, 2, 3, 4]):
            yield response

    async with serving(first_is_slow) as (_, router):
        run = LoadRun([router], LoadBounds(num_requests=10, most_open=1))
        await run.open(conversations(SHAPE, 1, 0), constant(20))
    slow = [each for each in run.outcomes if each.ttft_s > 0.4]
    assert len(slow) == 10, "each came within half a second, and none was answered before a second had passed"
    assert sum(each.ended - each.sent > 0.4 for each in run.outcomes) == 1


async def test_an_open_loop_does_not_wait_for_answers() -> None:
    async def silent(_: int, __: Any) -> AsyncIterator[pb.StreamChatResponse]:
        await asyncio.sleep(1.0)
        async for response in answer([1]):
            yield response

    async with serving(silent) as (service, router):
        run = LoadRun([router], LoadBounds(num_requests=30))
        task = asyncio.ensure_future(run.open(conversations(SHAPE, 1, 0), constant(100)))
        async with asyncio.timeout(20), service.came:
            await service.came.wait_for(lambda: service.num_requests == 30)
        assert run.num_came == 30
        await task
    assert len(run.outcomes) == 30
    assert min(each.ended for each in run.outcomes) > run.started + 1.0


async def test_lost_repeated_and_changed_tokens_are_found() -> None:
    async def wrong(number: int, _: Any) -> AsyncIterator[pb.StreamChatResponse]:
        async for response in answer([1, 2, 3, 4] if number != 3 else [1, 2, 9, 4]):
            delta = response.event.delta
            if number == 1 and delta.token_ids and delta.first_index == 2:
                continue
            yield response
            if number == 2 and delta.token_ids and delta.first_index == 2:
                yield response

    async with serving(wrong) as (_, router):
        run = LoadRun([router], LoadBounds(num_requests=4))
        await run.closed(conversations(SHAPE, 1, 0), 1)
    found = document(run, Window(0.0, 9.0), Objectives())["verdict"]
    assert (found["lost_tokens"], found["repeated_tokens"]) == (1, 1)
    assert found["changed_answers"] >= 2
    assert any("token 2 is 9, not 3" in example for example in found["examples"])
    assert not flawless(found)


async def test_a_refused_request_is_a_refusal_where_clients_do_not_wait() -> None:
    async def full(number: int, context: Any) -> AsyncIterator[pb.StreamChatResponse]:
        if number == 1:
            from google.rpc import code_pb2, error_details_pb2, status_pb2
            from grpc_status import rpc_status

            status = status_pb2.Status(code=code_pb2.RESOURCE_EXHAUSTED, message="full")
            retry = error_details_pb2.RetryInfo()
            retry.retry_delay.FromMilliseconds(10)
            status.details.add().Pack(retry)
            await context.abort_with_status(rpc_status.to_status(status))
        async for response in answer([1, 2]):
            yield response

    for waits, requests in ((False, (3, 2, 1)), (True, (3, 3, 0))):
        async with serving(full) as (_, router):
            run = LoadRun([router], LoadBounds(num_requests=3, waits=waits))
            await run.closed(conversations(SHAPE, 1, 0), 1)
        figures = document(run, Window(0.0, 9.0), Objectives())
        assert tuple(figures["requests"][name] for name in ("counted", "complete", "refused")) == requests
        assert flawless(figures["verdict"])


async def test_a_cluster_that_refuses_all_is_an_error_before_the_load() -> None:
    async def missing(_: int, context: Any) -> AsyncIterator[pb.StreamChatResponse]:
        await context.abort(grpc.StatusCode.NOT_FOUND, "no such model")
        yield event()

    async with serving(missing) as (_, router):
        with pytest.raises(RyzansteinError, match="no such model"):
            await LoadRun([router], LoadBounds()).measure(SHAPE)


async def test_a_page_has_everything_in_itself() -> None:
    async with serving(same) as (_, router):
        run = LoadRun([router], LoadBounds(num_requests=6))
        await run.closed(conversations(SHAPE, 2, 0), 2)
    made = {"command": "ryzanstein load --model '<b>'", "machine": {"cpu": "c", "cores": 1, "date": "d"}}
    text = page({**made, **document(run, Window(0.0, 9.0), Objectives())}, run.outcomes, run.started)
    assert text.count("<svg") == 3
    assert "&lt;b&gt;" in text
    assert "<script" not in text
    assert 'src="' not in text


async def test_a_load_of_which_nothing_counts_has_tables_and_a_page_too() -> None:
    run = LoadRun([], LoadBounds(num_requests=1))
    await run.closed(iter(()), 1)
    made = {"command": "c", "machine": {"cpu": "c", "cores": 1, "date": "d"}}
    figures = {**made, **document(run, Window(0.0, 9.0), Objectives(ttft_s=1.0))}
    assert len(tables(figures)) == 2
    assert page(figures, run.outcomes, run.started).count("<svg") == 3


@pytest.mark.parametrize("text", ["ttft", "ttft=", "ttft=0", "ttft=nan", "speed=1", "e2e=1e9", "tpot=-1"])
def test_a_wrong_objective_is_refused(text: str) -> None:
    with pytest.raises(ObjectiveError):
        Objectives.read(text)


def test_objectives_are_read() -> None:
    assert Objectives.read(" ttft=0.5, tpot=0.05") == Objectives(0.5, 0.05, None)
