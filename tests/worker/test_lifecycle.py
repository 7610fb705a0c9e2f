"""A node's life: starting, readiness, draining, stopping, changing its model; and settings that are wrong."""

import asyncio
import json
import shutil
import signal
import subprocess
import sys

import grpc
import pytest

from ryzanstein.generation.prompts import TokenPrompt
from ryzanstein.rpc.client import open_channel
from ryzanstein.rpc.status import error_from_rpc
from ryzanstein.v1 import worker_pb2 as pb
from ryzanstein.v1.inference_pb2 import Messages
from ryzanstein.v1.worker_pb2_grpc import WorkerServiceStub
from ryzanstein.wire.membership import beat_from_wire

pytestmark = pytest.mark.cluster


async def refused(call) -> object:
    """The error that a call ended with."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return error_from_rpc(caught.value)


async def test_a_node_becomes_ready_drains_and_exits_with_0(start_node, connect, attempt, health, running):
    node = start_node(tp=1)
    address = node.address
    pids = node.rank_pids()
    assert await health(address, "") == "SERVING"
    assert await health(address, "startup") == "NOT_SERVING"
    assert await health(address, "readiness") == "NOT_SERVING"
    await asyncio.to_thread(node.wait_event, "ranks ready")
    assert await health(address, "readiness", until="SERVING") == "SERVING"
    assert await health(address, "startup") == "SERVING"
    async with connect(address) as link:
        handle = await link.submit(attempt(max_tokens=400, ignore_eos=True))
        await link.wait(handle, lambda s: len(s.tokens()) > 5)
        node.process.send_signal(signal.SIGTERM)
        await link.until(lambda: link.beats and link.beats[-1][1].state == pb.NODE_STATE_DRAINING)
        late = await link.run(attempt())
        assert late.failed.reason == "DRAINING"
        stream = await link.wait(handle, lambda s: bool(s.finished))
        assert stream.indices() == list(range(400))
        await link.until_ended()
    assert await asyncio.to_thread(node.process.wait, 20) == 0
    assert not any(map(running, pids))


async def test_what_outlives_the_grace_is_cut_off_for_its_router_to_continue(start_node, connect, attempt):
    node = start_node("--drain-grace-s", "0.3", tp=1)
    node.wait_event("ranks ready")
    async with connect(node.address) as link:
        handle = await link.submit(attempt(max_tokens=1900, ignore_eos=True))
        await link.wait(handle, lambda s: len(s.tokens()) > 2)
        node.process.send_signal(signal.SIGTERM)
        await link.until_ended(20)
        assert not link.streams[handle].finished
    assert await asyncio.to_thread(node.process.wait, 20) == 0


@pytest.fixture
def broken_model(demo_dir, tmp_path):
    """One layer more than there are tensors for."""
    broken = tmp_path / "broken"
    shutil.copytree(demo_dir, broken, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps({**config, "num_hidden_layers": config["num_hidden_layers"] + 1}))
    return broken


async def test_a_models_life_by_rpc(start_node, connect, attempt, demo_dir, broken_model):
    """Unload, refuse a broken one by the tensor's name, load again, drain."""
    node = start_node(tp=1)
    node.wait_event("ranks ready")
    async with open_channel(node.address) as channel, connect(node.address) as link:
        stub = WorkerServiceStub(channel)
        handle = await link.submit(attempt(max_tokens=1500, ignore_eos=True))
        await link.wait(handle, lambda s: len(s.tokens()) > 2)
        assert (await refused(stub.UnloadModel(pb.UnloadModelRequest(model="demo")))).reason == "GENERATIONS_RUN"
        await link.cancel(handle)
        assert (await refused(stub.UnloadModel(pb.UnloadModelRequest(model="other")))).reason == "MODEL_NOT_FOUND"
        await stub.UnloadModel(pb.UnloadModelRequest(model="demo"))
        status = await stub.GetStatus(pb.GetStatusRequest())
        assert (status.beat.state, list(status.ranks)) == (pb.NODE_STATE_STARTING, [])
        assert (await link.run(attempt())).failed.reason == "NODE_NOT_READY"

        error = await refused(stub.LoadModel(pb.LoadModelRequest(model="broken", path=str(broken_model))))
        assert error.reason == "MODEL_REFUSED"
        assert "layers.4" in error.message
        assert (await stub.GetStatus(pb.GetStatusRequest())).beat.state == pb.NODE_STATE_FAILED

        await stub.LoadModel(pb.LoadModelRequest(model="renamed", path=str(demo_dir)))
        handle = await link.submit(attempt(max_tokens=5, ignore_eos=True), model="renamed")
        await link.wait(handle, lambda s: bool(s.finished))
        assert (await stub.Drain(pb.DrainRequest())).unfinished == 0
        assert (await link.run(attempt())).failed.reason == "DRAINING"


@pytest.mark.long
async def test_gloo_gives_the_same_tokens_as_shared_memory(start_node, connect, link, attempt):
    node = start_node("--collectives", "gloo")
    node.wait_event("ranks ready")
    asked = attempt(prompt=TokenPrompt((300, 7, 451)), temperature=2.0, max_tokens=30, ignore_eos=True)
    async with connect(node.address) as other:
        assert (await other.run(asked)).rows == (await link.run(asked)).rows


async def test_a_node_says_how_it_computes(start_node, connect, link):
    sparse = start_node("--sparse-attention", "window=64")
    sparse.wait_event("ranks ready")
    async with connect(sparse.address) as other:
        here, there = (beat_from_wire(each.hello.beat).numerics for each in (link, other))
    assert here.known
    assert there.known
    assert here.differs(there)


async def test_prompt_tokens_are_counted_as_a_generation_counts_them(stub, link, attempt):
    messages = Messages(messages=[{"role": "ROLE_USER", "content": "Count from 1 to 40."}])
    counted = await stub.CountPromptTokens(pb.CountPromptTokensRequest(model="demo", messages=messages))
    stream = await link.run(attempt(max_tokens=1))
    assert counted.tokens == stream.prompt_tokens > 0
    unknown = await refused(stub.CountPromptTokens(pb.CountPromptTokensRequest(model="other", messages=messages)))
    assert unknown.reason == "MODEL_NOT_FOUND"


def operators(response: pb.ProfileResponse) -> set[str]:
    """Of torch, that a trace has."""
    names = {event.get("name", "") for event in json.loads(response.chrome_trace)["traceEvents"]}
    return {name for name in names if name.startswith("aten::")}


@pytest.mark.parametrize("rank", [0, 1])
async def test_a_profile_that_is_given_up_half_way_leaves_nothing_to_the_next(stub, link, attempt, rank):
    """The next is of the other rank, and of fewer steps: a trace of the first would come too early and be too long."""
    given_up = stub.Profile(pb.ProfileRequest(rank=rank, steps=100), timeout=60)
    await asyncio.sleep(0.3)
    await link.run(attempt(max_tokens=20, ignore_eos=True))
    assert not given_up.done(), "20 steps of 100"
    given_up.cancel()
    handle = await link.submit(attempt(max_tokens=1900, ignore_eos=True))
    pids = [status.pid for status in (await stub.GetStatus(pb.GetStatusRequest())).ranks]
    for other in (1 - rank, rank):
        trace = json.loads((await stub.Profile(pb.ProfileRequest(rank=other, steps=2), timeout=60)).chrome_trace)
        computed = [event for event in trace["traceEvents"] if event.get("name", "").startswith("aten::")]
        assert {event["pid"] for event in computed} == {pids[other]}
        forwards = [event for event in computed if event["name"] == "aten::embedding"]
        assert len(forwards) <= 4
    await link.cancel(handle)


async def test_of_two_profiles_at_once_one_is_refused(stub, link, attempt):
    both = [asyncio.ensure_future(stub.Profile(pb.ProfileRequest(rank=rank, steps=3), timeout=60)) for rank in (0, 1)]
    (second,), (first,) = await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
    assert (await refused(second)).reason == "PROFILE_RUNS"
    await link.run(attempt(max_tokens=8, ignore_eos=True))
    assert operators(await first)


async def test_a_profile_that_was_asked_for_while_idle_records_the_work_that_comes(stub, link, attempt):
    asked = asyncio.ensure_future(stub.Profile(pb.ProfileRequest(rank=1, steps=3), timeout=60))
    await asyncio.sleep(0.3)
    assert not asked.done()
    await link.run(attempt(max_tokens=8, ignore_eos=True))
    assert operators(await asked)


@pytest.mark.parametrize("rank", [0, 1])
async def test_a_profile_is_a_chrome_trace_of_the_ranks_steps(stub, link, attempt, rank):
    handle = await link.submit(attempt(max_tokens=1500, ignore_eos=True))
    response = await stub.Profile(pb.ProfileRequest(rank=rank, steps=3), timeout=60)
    names = {event.get("name", "") for event in json.loads(response.chrome_trace)["traceEvents"]}
    assert any(name.startswith("aten::") for name in names)
    await link.cancel(handle)
    assert (await refused(stub.Profile(pb.ProfileRequest(rank=2)))).violations[0].field == "rank"
    assert (await refused(stub.Profile(pb.ProfileRequest(steps=101)))).violations[0].field == "steps"


async def traces_of(stub, **asked) -> dict[int, bytes]:
    traces = {}
    async for part in stub.RecordProfile(pb.RecordProfileRequest(**asked), timeout=60):
        traces[part.rank] = traces.get(part.rank, b"") + part.part
    return traces


async def test_profiles_of_all_ranks_are_of_the_same_steps_and_collectives(stub, link, attempt):
    handle = await link.submit(attempt(max_tokens=1500, ignore_eos=True))
    traces = await traces_of(stub, steps=4)
    await link.cancel(handle)
    assert list(traces) == [0, 1]
    rows = {}
    for rank, trace in traces.items():
        events = json.loads(trace)["traceEvents"]
        assert any(event.get("name", "").startswith("aten::") for event in events)
        steps = [event["name"] for event in events if event.get("cat") == "step"]
        rows[rank] = steps, [event["args"]["number"] for event in events if event.get("cat") == "collective"]
    assert rows[0] == rows[1]
    assert (len(rows[0][0]), len(rows[0][1]) % 4) == (4, 0)


async def test_profiles_of_some_ranks_and_wrong_ones(stub, link, attempt):
    handle = await link.submit(attempt(max_tokens=1500, ignore_eos=True))
    assert list(await traces_of(stub, steps=2, ranks=[1, 1])) == [1]
    await link.cancel(handle)
    for field, asked in (("ranks", {"ranks": [0, 2]}), ("steps", {"steps": 101})):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await traces_of(stub, **asked)
        assert error_from_rpc(caught.value).violations[0].field == field


async def test_a_stream_must_open_with_hello(stub):
    call = stub.Connect()
    await call.write(pb.ConnectRequest(cancel=pb.Cancel(handle=1)))
    error = await refused(call.read())
    assert error.violations[0].field == "frame"


async def test_a_handle_that_runs_cannot_be_used_again(link, attempt):
    handle = await link.submit(attempt(max_tokens=1500, ignore_eos=True))
    await link.wait(handle, lambda s: len(s.tokens()) > 2)
    await link.submit(attempt(), handle=handle)
    assert error_from_rpc(await link.until_ended()).violations[0].field == "submit.handle"


async def test_status_and_metrics_show_the_node(stub, link, attempt, metrics, eventually):
    await link.run(attempt(max_tokens=20, ignore_eos=True))
    status = await stub.GetStatus(pb.GetStatusRequest())
    async with asyncio.timeout(5):  # rank 1 leaves the last step when it gets a core
        while any(rank.phase != "idle" for rank in status.ranks):
            status = await stub.GetStatus(pb.GetStatusRequest())
    assert [(rank.rank, rank.phase) for rank in status.ranks] == [(0, "idle"), (1, "idle")]
    assert all(rank.resident_bytes > 50e6 and rank.collective > 0 for rank in status.ranks)
    assert len({rank.step for rank in status.ranks}) == 1
    lines = (
        'ryzanstein_worker_state{model="demo",state="ready"} 1.0',
        'ryzanstein_worker_tokens_total{kind="decode",model="demo"}',
        'ryzanstein_worker_generations_total{model="demo",outcome="finished"}',
        'ryzanstein_worker_startup_phase_seconds{model="demo",phase="load",rank="1"}',
        'ryzanstein_worker_step_seconds_count{model="demo",rank="1"}',
        'ryzanstein_worker_rank_seconds_total{model="demo",phase="collective",rank="1"}',
        'ryzanstein_worker_rank_seconds_total{model="demo",phase="schedule",rank="0"}',
        'ryzanstein_worker_rank_steps_total{model="demo",rank="1"}',
        'ryzanstein_worker_rank_collectives_total{model="demo",rank="1"}',
        'ryzanstein_worker_step_tokens_count{model="demo"}',
        'ryzanstein_worker_collective_skew_seconds_count{model="demo",op="all_reduce"}',
        'ryzanstein_worker_collective_transfer_seconds_count{model="demo",op="all_reduce"}',
        'ryzanstein_worker_collective_last_total{model="demo",rank="1"}',
        'ryzanstein_worker_collective_late_seconds_total{model="demo",rank="1"}',
    )

    async def shown() -> bool:
        page = await metrics()
        return all(line in page for line in lines)

    await eventually(shown, 5, "the next beat shows the last steps")


@pytest.mark.parametrize(
    ("flags", "code", "wording"),
    [
        (("--tp", "0"), 2, "tp"),
        (("--max-sequences", "600"), 2, "max_tokens_per_step"),
        (("--no-such-flag", "1"), 2, "no-such-flag"),
        (("--model", "/nowhere/at/all"), 1, "/nowhere/at/all/config.json"),
        (("--model", "{demo}", "--tp", "9"), 1, "for 9 ranks: each needs an attention head"),
        (("--model", "{demo}", "--tp", "64", "--device", "cuda"), 1, "tp 64 needs 64 GPUs, "),
    ],
)
@pytest.mark.long
async def test_a_node_that_cannot_start_says_why_and_by_its_exit_code(flags, code, wording, demo_dir):
    command = [sys.executable, "-m", "ryzanstein.worker", "--grpc-port", "0", *(flag.format(demo=demo_dir) for flag in flags)]
    result = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == code, result.stderr
    assert wording in result.stderr
