"""What a router hears on its stream while the node is busy with what it sent before."""

import asyncio

import grpc
import pytest

from ryzanstein.v1 import worker_pb2 as pb
from ryzanstein.wire.attempts import attempt_to_wire


@pytest.fixture
async def call(stub):
    call = stub.Connect()
    await call.write(pb.ConnectRequest(hello=pb.RouterHello(router_id="router-t")))
    assert (await call.read()).HasField("hello")
    yield call
    call.cancel()


async def frames_until(call, kind: str, handle: int = 0) -> list[pb.ConnectResponse]:
    """What comes until a frame of that kind, which is the last one; a failure or acceptance of `handle` when it is given."""
    frames: list[pb.ConnectResponse] = []
    async with asyncio.timeout(30):
        while True:
            frames.append(await call.read())
            assert frames[-1] is not grpc.aio.EOF
            output = frames[-1].output
            reported = not handle or handle in [row.handle for row in (*output.accepted, *output.failed)]
            if frames[-1].WhichOneof("frame") == kind and reported:
                return frames


def beat(sequence: int) -> pb.ConnectRequest:
    return pb.ConnectRequest(beat=pb.RouterBeat(sequence=sequence))


async def test_each_beat_of_a_router_is_answered_with_its_number(call):
    for sequence in (1, 2, 7):
        await call.write(beat(sequence))
        assert (await frames_until(call, "ack"))[-1].ack.sequence == sequence


async def test_a_router_that_wants_no_answer_gets_none(call):
    await call.write(beat(0))
    await call.write(beat(1))
    acks = [frame.ack.sequence for frame in await frames_until(call, "ack") if frame.HasField("ack")]
    assert acks == [1]


async def test_a_beat_behind_long_prompts_is_answered_before_they_are_tokenized(call, attempt):
    prompts = 60
    for handle in range(1, prompts + 1):
        question = f"{handle}: " + "What is the largest of 3, 14 and 15? " * 850
        await call.write(pb.ConnectRequest(submit=attempt_to_wire(attempt(question), handle)))
    await call.write(beat(1))
    frames = await frames_until(call, "ack")
    answered = {failed.handle for frame in frames for failed in frame.output.failed}
    frames += await frames_until(call, "output", handle=prompts)
    failed = [row for frame in frames for row in frame.output.failed]
    assert [row.handle for row in failed] == list(range(1, prompts + 1)), "in their order"
    assert {row.reason for row in failed} == {"CONTEXT_TOO_LONG"}
    assert len(answered) < prompts / 2


def cancelled(page: str) -> float:
    name = 'ryzanstein_worker_generations_total{model="demo",outcome="cancelled"}'
    return sum(float(line.rpartition(" ")[2]) for line in page.splitlines() if line.startswith(name))


async def test_a_cancel_still_comes_after_its_submit(call, attempt, stub, metrics, eventually):
    before = cancelled(await metrics())
    for handle in range(1, 6):
        submit = attempt_to_wire(attempt("What is the largest of 3, 14 and 15? " * 120, max_tokens=8), handle)
        await call.write(pb.ConnectRequest(submit=submit))
        await call.write(pb.ConnectRequest(cancel=pb.Cancel(handle=handle)))
    await call.write(pb.ConnectRequest(submit=attempt_to_wire(attempt(max_tokens=1), 6)))
    await frames_until(call, "output", handle=6)
    # Those that waited to be tokenized were not begun.
    assert before <= cancelled(await metrics()) <= before + 5

    async def at_rest() -> bool:
        status = await stub.GetStatus(pb.GetStatusRequest())
        load = status.beat.load
        return (status.kv_blocks_held, load.running, load.waiting, list(status.beat.preparing)) == (0, 0, 0, [])

    await eventually(at_rest, 10)


async def test_a_frame_that_makes_no_sense_ends_the_stream_with_its_error(call):
    await call.write(pb.ConnectRequest(hello=pb.RouterHello(router_id="again")))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await frames_until(call, "output")
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
