"""Both clients over real connections to routers that break."""

from __future__ import annotations

import time
from typing import Any

import grpc
import pytest

from ryzanstein.client import AsyncClient, Client, Moved, Reattached, Text
from ryzanstein.client import errors as raised
from ryzanstein.errors import Code, RyzansteinError

LOST = grpc.StatusCode.UNAVAILABLE
NUM = 40


def tokens(answer: Any) -> list[int]:
    return list(answer.token_ids)


WHOLE = list(range(100, 100 + NUM))


def test_an_answer_without_a_fault(faces: Any, start_router: Any, cluster: Any) -> None:
    cluster.moves_at = 10
    answer, events = faces.chat(start_router().address)
    assert tokens(answer) == WHOLE
    assert answer.text == "".join(event.text for event in events if isinstance(event, Text))
    assert (answer.finish_reason, answer.usage.completion_tokens, answer.model) == ("stop", NUM, "m")
    assert answer.nodes == ["node-0", "node-1"]
    assert [(part.node, part.first_index, part.tokens) for part in answer.parts] == [("node-0", 0, 10), ("node-1", 10, 30)]
    assert answer.text[answer.parts[0].start : answer.parts[0].end] == "".join(f"{token} " for token in WHOLE[:10])
    (move,) = [event.move for event in events if isinstance(event, Moved)]
    assert (move.from_node, move.to_node, move.at_index) == ("node-0", "node-1", 10)
    assert answer.moves == [move]


def test_a_stream_that_breaks_goes_on_at_the_next_index(faces: Any, start_router: Any, cluster: Any) -> None:
    router = start_router((5, LOST), (0, LOST), (7, grpc.StatusCode.INTERNAL), (3, grpc.StatusCode.UNKNOWN))
    answer, events = faces.chat(router.address)
    assert tokens(answer) == WHOLE
    assert router.script.attached == [{0: 5}, {0: 5}, {0: 12}, {0: 15}]
    assert answer.reattaches == 4 == sum(isinstance(event, Reattached) for event in events)
    assert len(cluster.begun) == 1


def test_a_router_that_dies_is_left_for_another(faces: Any, start_router: Any, cluster: Any) -> None:
    routers = [start_router(), start_router(), start_router()]
    cluster.step_s = 0.01
    dead: list[Any] = []

    def kill(event: Any, stream: Any) -> None:
        if isinstance(event, Text) and event.first_index == 20 and not dead:
            (serving,) = [router for router in routers if router.script.requests]
            dead.append(serving)
            serving.server.stop(0)

    answer, _ = faces.chat(",".join(router.address for router in routers), on_event=kill)
    assert tokens(answer) == WHOLE
    assert dead
    assert sum(len(router.script.attached) for router in routers if router not in dead) >= 1
    assert len(cluster.begun) == 1


def test_a_begin_that_is_lost_is_sent_again_under_its_key(faces: Any, start_router: Any, cluster: Any) -> None:
    router = start_router((-1, LOST), (-1, LOST))
    answer, _ = faces.chat(router.address)
    assert tokens(answer) == WHOLE
    keys = [request.request_id for request in router.script.requests]
    assert len(keys) == 3
    assert len(set(keys)) == 1
    assert keys[0]
    assert not router.script.attached


def test_a_key_that_cannot_be_kept_is_left_out_unless_the_user_gave_it(faces: Any, start_router: Any, cluster: Any) -> None:
    away = RyzansteinError("the journal is unavailable", Code.UNAVAILABLE, "JOURNAL_UNAVAILABLE", retry_after_s=0.05)
    router = start_router((-1, away))
    assert tokens(faces.chat(router.address)[0]) == WHOLE
    assert [bool(request.request_id) for request in router.script.requests] == [True, False]
    router = start_router((-1, away), (-1, LOST))
    with pytest.raises(raised.RouterUnreachable):
        faces.chat(router.address)
    assert len(router.script.requests) == 2, "without a key it is not sent again: it may run"
    router = start_router((-1, away))
    assert tokens(faces.chat(router.address, request_id="mine")[0]) == WHOLE
    assert [request.request_id for request in router.script.requests] == ["mine", "mine"]


@pytest.mark.parametrize(
    ("reason", "error"),
    [
        ("QUEUE_FULL", raised.Overloaded),
        ("NO_NODES", raised.Unavailable),
        ("SESSION_BUSY", raised.SessionBusy),
        ("GENERATION_PAUSED", raised.Unavailable),
        ("A_LATER_REASON", raised.Unavailable),
    ],
)
def test_what_is_refused_for_now_is_asked_again(faces: Any, start_router: Any, reason: str, error: type) -> None:
    refusal = RyzansteinError("not now", Code.UNAVAILABLE, reason, retry_after_s=0.05)
    router = start_router((-1, refusal))
    began = time.monotonic()
    assert tokens(faces.chat(router.address)[0]) == WHOLE
    assert time.monotonic() - began >= 0.05
    late = RyzansteinError("not now", Code.UNAVAILABLE, reason, retry_after_s=60.0)
    router = start_router((-1, late))
    with pytest.raises(error):
        faces.chat(router.address, timeout_s=5.0)
    assert len(router.script.requests) == 1


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RyzansteinError("temperature: no", Code.INVALID_ARGUMENT, "INVALID_ARGUMENT", {"field": "x"}), raised.InvalidRequest),
        (RyzansteinError("gave up", Code.INTERNAL, "INTERNAL"), raised.AnswerFailed),
        (RyzansteinError("no key", Code.UNAUTHENTICATED, "KEY_MISSING"), raised.KeyRefused),
        (RyzansteinError("late", Code.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED"), raised.DeadlineExceeded),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, raised.RequestTooLarge),
        (grpc.StatusCode.UNIMPLEMENTED, raised.VersionError),
        (grpc.StatusCode.PERMISSION_DENIED, raised.KeyRefused),
    ],
)
def test_what_cannot_be_helped_is_raised_at_once(faces: Any, start_router: Any, error: Any, expected: type) -> None:
    router = start_router((-1, error))
    with pytest.raises(expected):
        faces.chat(router.address)
    assert len(router.script.requests) == 1


def test_an_error_in_the_middle_keeps_what_had_come(faces: Any, start_router: Any) -> None:
    router = start_router((9, RyzansteinError("gave up", Code.INTERNAL, "ATTEMPTS_EXHAUSTED")))
    with pytest.raises(raised.AnswerFailed) as failed:
        faces.chat(router.address)
    assert failed.value.partial is not None
    assert tokens(failed.value.partial) == WHOLE[:9]


def test_numbers_of_errors_are_numbers(faces: Any, start_router: Any, refused: Any) -> None:
    with pytest.raises(raised.ContextTooLong) as failed:
        faces.chat(start_router((-1, refused.context_too_long(90, 20, 100))).address)
    assert (failed.value.prompt_tokens, failed.value.max_tokens, failed.value.context_length) == (90, 20, 100)
    assert failed.value.field == "sampling.max_tokens"


def test_a_skipped_index_is_asked_for_once_and_then_an_error(faces: Any, start_router: Any) -> None:
    router = start_router((5, "gap"))
    assert tokens(faces.chat(router.address)[0]) == WHOLE
    assert router.script.attached == [{0: 5}]
    with pytest.raises(raised.ProtocolError) as failed:
        faces.chat(start_router((5, "gap"), (0, "gap")).address)
    assert failed.value.partial is not None
    assert tokens(failed.value.partial) == WHOLE[:5]


def test_a_stream_that_ends_early_is_a_lost_one(faces: Any, start_router: Any) -> None:
    router = start_router((5, ""))
    assert tokens(faces.chat(router.address)[0]) == WHOLE
    assert router.script.attached == [{0: 5}]


def test_several_choices_go_on_each_at_its_own_index(faces: Any, start_router: Any, cluster: Any) -> None:
    cluster.num_choices = 3
    router = start_router((10, LOST))
    answer, _ = faces.chat(router.address, n=3)
    assert [choice.token_ids for choice in answer.choices] == [WHOLE] * 3
    assert router.script.attached == [{0: 4, 1: 3, 2: 3}]
    assert all(choice.finish_reason == "stop" for choice in answer.choices)


def test_a_generation_that_no_router_knows_is_lost_with_its_part(faces: Any, start_router: Any, refused: Any) -> None:
    unknown = refused.not_found("generation", "generation-0")
    routers = [start_router(), start_router()]
    routers[0].script.breaks = routers[1].script.breaks = [(5, LOST), (-1, unknown), (-1, unknown)]
    with pytest.raises(raised.AnswerLost) as failed:
        faces.chat([router.address for router in routers])
    assert failed.value.partial is not None
    assert tokens(failed.value.partial) == WHOLE[:5]


def test_a_generation_without_a_token_that_no_router_knows_is_begun_again(
    faces: Any, start_router: Any, cluster: Any, refused: Any
) -> None:
    router = start_router((0, LOST), (-1, refused.not_found("generation", "generation-0")))
    assert tokens(faces.chat(router.address)[0]) == WHOLE


def test_no_router_at_all_is_said_with_each_address(faces: Any) -> None:
    with pytest.raises(raised.RouterUnreachable, match=r"127\.0\.0\.1:1: .*127\.0\.0\.1:2: "):
        faces.chat("127.0.0.1:1,127.0.0.1:2", client={"patience_s": 0.5})


def test_leaving_early_cancels_at_the_server(faces: Any, start_router: Any, cluster: Any) -> None:
    cluster.step_s = 0.02

    def leave(event: Any, stream: Any) -> Any:
        return "leave" if isinstance(event, Text) and event.first_index == 3 else None

    answer, _ = faces.chat(start_router().address, on_event=leave)
    assert cluster.cancelled == [answer.generation_id]
    assert len(answer.token_ids) < NUM


def test_cancel_reads_to_the_end_that_the_server_says(faces: Any, start_router: Any, cluster: Any) -> None:
    cluster.step_s = 0.02

    def cancel(event: Any, stream: Any) -> Any:
        return stream.cancel() if isinstance(event, Text) and event.first_index == 3 else None

    answer, _ = faces.chat(start_router().address, on_event=cancel)
    assert answer.finish_reason == "cancelled"
    assert cluster.cancelled == [answer.generation_id]
    assert 4 <= len(answer.token_ids) < NUM


def test_a_silent_router_is_left_for_another_one(faces: Any, start_router: Any) -> None:
    routers = [start_router((5, "silence")), start_router((5, "silence"))]
    began = time.monotonic()
    answer, _ = faces.chat([router.address for router in routers], client={"stall_s": 0.3})
    assert tokens(answer) == WHOLE
    assert 0.3 <= time.monotonic() - began < 10


def test_a_deadline_ends_a_stream_that_is_silent(faces: Any, start_router: Any) -> None:
    with pytest.raises(raised.DeadlineExceeded) as failed:
        faces.chat(start_router((5, "silence")).address, timeout_s=2.0)
    assert failed.value.partial is not None
    assert tokens(failed.value.partial) == WHOLE[:5]


def test_another_reader_goes_on_from_a_position(start_router: Any, cluster: Any) -> None:
    address = start_router().address
    with Client(address) as first:
        stream = first.stream("hello")
        for event in stream:
            if isinstance(event, Text) and event.first_index == 9:
                break
        position = stream.detach()
        assert list(stream) == []
    assert position.next_index == (10,)
    assert cluster.cancelled == []
    with Client(address) as second:
        answer = second.attach(position).finish()
    assert (tokens(answer), answer.reattaches) == (WHOLE[10:], 0)


async def test_a_detached_answer_of_a_loop_is_not_cancelled(start_router: Any, cluster: Any) -> None:
    cluster.step_s = 0.02
    async with AsyncClient(start_router().address) as client, client.stream("hello") as stream:
        await anext(stream)
        assert stream.detach().generation_id == "generation-0"
        assert [event async for event in stream] == []
    assert cluster.cancelled == []


def test_a_key_is_sent_to_this_machine_and_never_to_another_in_the_clear(faces: Any, start_router: Any) -> None:
    router = start_router()
    faces.chat(router.address, client={"key": "rz-secret"})
    assert router.script.metadata[0]["authorization"] == "Bearer rz-secret"
    for made in (Client, AsyncClient):
        with pytest.raises(ValueError, match=r"router\.example:50051 without TLS") as failed:
            made("router.example:50051", key="rz-secret")
        assert "rz-secret" not in str(failed.value)
        assert "rz-secret" not in repr(made("router.example:50051", key="rz-secret", insecure=True))


def test_a_call_that_may_be_repeated_is(faces: Any, start_router: Any) -> None:
    router = start_router((0, LOST), (0, LOST))
    assert [model.name for model in faces.call(router.address, "models")] == ["m"]
    assert len(router.script.requests) == 3


async def test_a_blocking_client_says_that_it_would_block_the_loop(start_router: Any) -> None:
    with Client(start_router().address) as client, pytest.raises(RuntimeError, match="AsyncClient"):
        client.models()
