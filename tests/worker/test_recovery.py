"""Ranks that run short of memory, compute no numbers, or lose the bits of their weights. Real processes, real shortage."""

from __future__ import annotations

import asyncio
import os
import resource
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from google.protobuf.duration_pb2 import Duration
from safetensors.torch import load_file, save_file

from ryzanstein.errors import Code
from ryzanstein.generation.prompts import TokenPrompt
from ryzanstein.rpc.client import open_channel
from ryzanstein.tools.synthesize.command import Recipe, synthesize
from ryzanstein.tools.synthesize.shapes import ModelShape
from ryzanstein.v1 import worker_pb2 as pb
from ryzanstein.v1.worker_pb2_grpc import WorkerServiceStub
from ryzanstein.wire.attempts import attempt_to_wire

pytestmark = pytest.mark.cluster

WIDE = ModelShape(64, 2, 4, 2, 32768, 262144)  # a step of many tokens needs megabytes, a single one needs a row of logits
LENGTHS = (400, 30, 3, 120)


def room(pid: int, more_bytes: int | None) -> None:
    """Lets a process have so much address space beyond what it has now; None: what it likes."""
    now = int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()
    unlimited = resource.RLIM_INFINITY
    resource.prlimit(pid, resource.RLIMIT_AS, (unlimited if more_bytes is None else now + more_bytes, unlimited))


@pytest.fixture(scope="module")
def wide_dir(tmp_path_factory) -> Path:
    model_dir = tmp_path_factory.mktemp("wide")
    synthesize(model_dir, Recipe("llama", WIDE, "float32", 0, 1))
    return model_dir


@pytest.fixture
def wide_node(start_node, wide_dir, monkeypatch):
    # Every allocation of more than a few pages is the system's, so that the limit is what decides.
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")
    return start_node("--model-name", "demo", "--kv-bytes", "16000000", model=wide_dir)


async def answers(link, attempt) -> list:
    """Prompts of several lengths at once, greedy and drawn."""
    attempts = [
        attempt(prompt=TokenPrompt(tuple((7 * i + j) % 60000 for j in range(n))), max_tokens=12, ignore_eos=True, **more)
        for i, (n, more) in enumerate((n, more) for n in LENGTHS for more in ({}, {"temperature": 0.9, "n": 2}))
    ]
    return await asyncio.gather(*(link.run(one, 60) for one in attempts))


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.lab)])
@pytest.mark.long
async def test_a_rank_short_of_memory_serves_all_the_same(wide_node, connect, attempt, running, rank) -> None:
    node = wide_node
    pids = node.wait_event("ranks ready") and node.rank_pids()
    async with connect(node.address) as link:
        whole = await answers(link, attempt)
        assert all(stream.failed is None for stream in whole)
        room(pids[rank], 16 * 2**20)
        new = link.run(attempt(prompt=TokenPrompt(tuple(range(1000, 1450))), max_tokens=4), 60)
        *short, other = [*await answers(link, attempt), await new]
        assert other.failed is None
        assert [stream.failed for stream in short] == [None] * len(short)
        assert [stream.rows for stream in short] == [stream.rows for stream in whole]
        assert node.wait_event("step retried in smaller parts", 2)["rung"] == "retry_smaller"

        room(pids[0], 0)
        refused = await link.run(attempt(prompt=TokenPrompt((1, 2, 3)), max_tokens=4, temperature=0.9, logprobs=5))
        assert (refused.failed.code, refused.failed.reason) == (Code.RESOURCE_EXHAUSTED, "OUT_OF_MEMORY")
        assert not refused.failed.node_fault
        room(pids[0], None)
        room(pids[rank], None)
        after = await answers(link, attempt)
        assert [stream.rows for stream in after] == [stream.rows for stream in whole]
    assert all(map(running, pids)), "no rank was restarted"


POISON, WORD = 700, 400  # ids of the demo vocabulary


@pytest.fixture
def poisoned_dir(tmp_path, demo_dir) -> Path:
    """The demo model with one token whose embedding is no number."""
    model_dir = tmp_path / "poisoned"
    shutil.copytree(demo_dir, model_dir, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    weights = load_file(model_dir / "model.safetensors")
    # The head is a matrix of its own here, so that the token is broken as a prompt only.
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    weights["model.embed_tokens.weight"][POISON] = torch.nan
    save_file(weights, model_dir / "model.safetensors", {"format": "pt"})
    config = model_dir / "config.json"
    config.write_text(config.read_text().replace('"tie_word_embeddings": true', '"tie_word_embeddings": false'))
    return model_dir


@pytest.fixture(params=["auto", "torch"])
def poisoned_node(start_node, poisoned_dir, request):
    return start_node("--model-name", "demo", "--num-blocks", "8", "--kernels", request.param, model=poisoned_dir)


@pytest.mark.long
async def test_a_prompt_that_leads_to_no_numbers_fails_alone_and_poisons_no_other(
    poisoned_node, connect, attempt, running
) -> None:
    node = poisoned_node
    pids = node.wait_event("ranks ready") and node.rank_pids()
    good = [attempt(prompt=TokenPrompt((WORD, WORD + i)), max_tokens=20, ignore_eos=True) for i in range(2)]
    async with connect(node.address) as link:
        whole = await asyncio.gather(*map(link.run, good))
        for i in range(6):  # through all of the few blocks, so that what it left in them is read over by others
            bad = attempt(prompt=TokenPrompt((POISON, WORD + i, *range(40 + i, 70))), max_tokens=4)
            stream, *others = await asyncio.gather(link.run(bad), *map(link.run, good))
            assert (stream.failed.code, stream.failed.reason) == (Code.INTERNAL, "LOGITS_NOT_FINITE")
            assert not stream.failed.node_fault
            assert stream.rows == {}
            assert [other.rows for other in others] == [first.rows for first in whole]
    assert all(map(running, pids))


def overwrite(pid: int, known: bytes) -> int:
    """Makes every copy of some float32 weights in a process's memory NaN; how many there were."""
    broken = torch.full((len(known) // 4,), torch.nan).numpy().tobytes()
    count = 0
    with Path(f"/proc/{pid}/mem").open("r+b", buffering=0) as memory:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            span, rights, *_, inode = line.split()[:5]
            start, end = (int(number, 16) for number in span.split("-"))
            if not rights.startswith("rw") or inode != "0" or end - start > 2**28:
                continue
            memory.seek(start)
            try:
                held = memory.read(end - start)
            except OSError:  # unmapped since the list was read
                continue
            at = held.find(known)
            while at >= 0:
                memory.seek(start + at)
                memory.write(broken)
                count += 1
                at = held.find(known, at + len(known))
    return count


async def test_ranks_that_lost_their_weights_are_started_again(start_node, connect, attempt, demo_dir, running) -> None:
    node = start_node()
    pids = node.wait_event("ranks ready") and node.rank_pids()
    norm = load_file(demo_dir / "model.safetensors")["model.norm.weight"].numpy().tobytes()
    async with connect(node.address) as link:
        whole = await link.run(attempt(max_tokens=20, ignore_eos=True))
        handle = await link.submit(attempt(max_tokens=1800, ignore_eos=True))
        await link.wait(handle, lambda s: len(s.tokens()) > 10)
        assert overwrite(pids[0], norm) > 0
        stream = await link.wait(handle, lambda s: s.failed is not None)
        assert (stream.failed.code, stream.failed.reason) == (Code.UNAVAILABLE, "RANKS_UNSOUND")
        assert stream.failed.node_fault
        await link.until(lambda: any(beat.state == pb.NODE_STATE_RECOVERING for _, beat in link.beats), 10)
        await link.until(lambda: link.beats[-1][1].state == pb.NODE_STATE_READY, 60)
        assert not any(map(running, pids))
        after = await link.run(attempt(max_tokens=20, ignore_eos=True))
        assert after.rows == whole.rows


async def test_ranks_do_not_come_back_with_other_files_than_they_had(start_node, connect, attempt, tmp_path, demo_dir) -> None:
    """Someone has replaced the weights under the same path: what the node says of the model is of the earlier ones."""
    model_dir = tmp_path / "demo"
    shutil.copytree(demo_dir, model_dir, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    node = start_node("--model-name", "demo", model=model_dir)
    pids = node.wait_event("ranks ready") and node.rank_pids()
    async with connect(node.address) as link:
        whole = await link.run(attempt(max_tokens=5, ignore_eos=True))
        weights = load_file(model_dir / "model.safetensors")
        save_file({name: each * 1.01 for name, each in weights.items()}, tmp_path / "new", {"format": "pt"})
        os.replace(tmp_path / "new", model_dir / "model.safetensors")
        assert (await link.run(attempt(max_tokens=5, ignore_eos=True))).rows == whole.rows
        os.kill(pids[1], signal.SIGKILL)
        await link.until(lambda: link.beats[-1][1].state == pb.NODE_STATE_FAILED, 60)
    async with open_channel(node.address) as channel:
        stub = WorkerServiceStub(channel)
        status = await stub.GetStatus(pb.GetStatusRequest())
        assert status.beat.reason == (
            f"{model_dir}: the files changed after the model was loaded: deploy it with --reload, or restart the node"
        )
        await stub.LoadModel(pb.LoadModelRequest(model="demo", path=str(model_dir)))
        assert (await stub.GetStatus(pb.GetStatusRequest())).beat.state == pb.NODE_STATE_READY


@pytest.mark.long
async def test_a_checkpoint_that_leads_to_no_numbers_at_all_is_refused(start_node, tmp_path, demo_dir) -> None:
    model_dir = tmp_path / "broken"
    shutil.copytree(demo_dir, model_dir, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    weights = load_file(model_dir / "model.safetensors")
    weights["model.norm.weight"][:] = torch.nan
    save_file(weights, model_dir / "model.safetensors", {"format": "pt"})
    node = start_node(model=model_dir)
    assert "not finite" in node.wait_event("model refused")["reason"]
    assert node.process.wait(20) == 1


@pytest.mark.long
async def test_the_work_of_a_router_that_was_cut_off_is_freed(start_node, attempt, eventually) -> None:
    """No end of the stream tells of it: frames just stop coming. A router that promises no beats is not missed."""
    node = start_node("--tuning", '{"router_silence_s": 0.3}', tp=1)
    node.wait_event("ranks ready")
    async with open_channel(node.address) as channel:
        stub = WorkerServiceStub(channel)

        async def running() -> int:
            return (await stub.GetStatus(pb.GetStatusRequest())).beat.load.running

        calls = []
        for router_id, beat in (("quiet", None), ("cut off", Duration(nanos=50_000_000))):
            call = stub.Connect()
            await call.write(pb.ConnectRequest(hello=pb.RouterHello(router_id=router_id, beat_interval=beat)))
            submit = attempt_to_wire(attempt(max_tokens=1900, ignore_eos=True), 1)
            await call.write(pb.ConnectRequest(submit=submit))
            calls.append(call)
        for _ in range(10):
            await asyncio.sleep(0.1)
            await calls[1].write(pb.ConnectRequest(beat=pb.RouterBeat()))
        assert await running() == 2, "both are there"
        began = time.monotonic()
        await eventually(lambda: _is(running, 1), 5)
        assert time.monotonic() - began < 1.5
        assert [line["router_id"] for line in node.events if line["event"] == "router disconnected"] == ["cut off"]
        for call in calls:
            call.cancel()


async def _is(number, expected) -> bool:
    return await number() == expected


async def slow_down(pid: int, seconds: float) -> None:
    """A process that runs for a twentieth of the time."""
    end = time.monotonic() + seconds
    try:
        while time.monotonic() < end:
            os.kill(pid, signal.SIGSTOP)
            await asyncio.sleep(0.038)
            os.kill(pid, signal.SIGCONT)
            await asyncio.sleep(0.002)
    finally:
        os.kill(pid, signal.SIGCONT)


@pytest.mark.long
async def test_a_slow_rank_is_named_and_in_the_end_started_again(start_node, connect, attempt) -> None:
    node = start_node("--tuning", '{"ranks": {"slow": {"factor": 2, "warn_s": 2, "restart_s": 4}}}')
    node.wait_event("ranks ready")
    async with connect(node.address) as link, open_channel(node.address) as channel:
        ranks = (await WorkerServiceStub(channel).GetStatus(pb.GetStatusRequest())).ranks
        handle = await link.submit(attempt(max_tokens=1900, ignore_eos=True))
        await link.wait(handle, lambda s: len(s.tokens()) > 10)
        slowing = asyncio.create_task(slow_down(ranks[1].pid, 30))
        stream = await link.wait(handle, lambda s: s.failed is not None or s.finished, 30)
        slowing.cancel()
        await asyncio.wait([slowing])
        assert stream.failed.reason == "RANK_SLOW"
        assert stream.failed.metadata["rank"] == "1"
        warning = node.wait_event("rank slow")
        assert warning["rank"] == 1
        assert warning["ratio"] >= 2


@pytest.mark.long
async def test_a_restart_pays_for_no_import(start_node, connect, attempt, running) -> None:
    node = start_node()
    node.wait_event("ranks ready")
    servers = node.server_pids()

    async with connect(node.address) as link:
        whole = await link.run(attempt(max_tokens=20, ignore_eos=True))
        for restart in (1, 2):
            ranks = node.rank_pids()
            os.kill(ranks[restart - 1], signal.SIGKILL)
            await link.until(lambda restart=restart: len(starts(node)) == restart + 1, 30)
            first, again = starts(node)[0]["rank_0"], starts(node)[-1]["rank_0"]
            print(f"phases of the restart: {again}")
            assert again["spawn"] + again["import"] < 0.5 * (first["spawn"] + first["import"])
            assert not any(map(running, ranks))
            after = await link.run(attempt(max_tokens=20, ignore_eos=True))
            assert after.rows == whole.rows
    assert node.server_pids() == servers
    pids = servers + node.rank_pids()
    node.process.terminate()
    assert node.process.wait(20) == 0
    assert not any(map(running, pids))


@pytest.mark.long
async def test_a_node_whose_fork_server_is_killed_serves_again(start_node, connect, attempt, running) -> None:
    node = start_node()
    node.wait_event("ranks ready")
    pids = node.server_pids() + node.rank_pids()
    async with connect(node.address) as link:
        whole = await link.run(attempt(max_tokens=20, ignore_eos=True))
        handle = await link.submit(attempt(max_tokens=1800, ignore_eos=True))
        await link.wait(handle, lambda s: len(s.tokens()) > 10)
        os.kill(pids[0], signal.SIGKILL)
        stream = await link.wait(handle, lambda s: s.failed is not None)
        assert (stream.failed.code, stream.failed.reason) == (Code.UNAVAILABLE, "RANK_LOST")
        assert stream.failed.message == "the fork server died of SIGKILL, and every rank with it"
        await link.until(lambda: len(starts(node)) == 2, 30)
        assert not any(map(running, pids))
        after = await link.run(attempt(max_tokens=20, ignore_eos=True))
        assert after.rows == whole.rows


def starts(node) -> list[dict]:
    return [line for line in node.events if line["event"] == "ranks ready"]
