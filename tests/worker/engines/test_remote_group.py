"""A server as an engine group: what it does wrong loses the group, never the agent, and the next group finds it again."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.worker.engines.board_rank import Rank
from tests.worker.engines.recorded import DONE, vllm_event, vllm_usage
from tests.worker.engines.stub_server import EVENTS, Exchange, Stub, stub_server

from ryzanstein.generation.request import SamplingParams
from ryzanstein.worker.constraints.guidance import guidance_version
from ryzanstein.worker.engine.messages import CancelGroup, StepEvents, SubmitGroup
from ryzanstein.worker.engines.asking import PROTOCOL, SIGN, unpacked
from ryzanstein.worker.engines.remote.bounds import RemoteBounds
from ryzanstein.worker.engines.remote.finding import RemoteSpec
from ryzanstein.worker.engines.remote.group import RemoteEngines, RemoteGroup
from ryzanstein.worker.engines.remote.http.address import EngineAddress
from ryzanstein.worker.engines.remote.http.client import EngineClient
from ryzanstein.worker.engines.remote.http.faults import EngineProtocolError
from ryzanstein.worker.engines.vllm.board import BoardSlot
from ryzanstein.worker.settings.rank_settings import QueueSettings
from ryzanstein.worker.supervision.group import EngineModel, GroupEvents, LossCause, RanksLost
from ryzanstein.worker.supervision.messages import ProfileTrace, RankReady, StartProfile
from ryzanstein.worker.supervision.watchdog import StallBounds

QUICK = RemoteBounds(
    start_s=3.0, retry_s=0.05, health_s=0.5, check_s=0.2, watch_interval_s=0.02, prefill_s=0.6, stall=StallBounds(min_s=0.3)
)
VOCABULARY = 1000


def asked(group: int = 1, num_prompt: int = 3, **sampling: Any) -> SubmitGroup:
    params = SamplingParams(**{"temperature": 0.0, "seed": 1, **sampling})
    return SubmitGroup(group, list(range(1, 1 + num_prompt)), params, 8, [0], [[]], [False])


def be_vllm(stub: Stub) -> None:
    """A vLLM that answers probes, and everything else with the tokens 11, 12, ..., 18."""
    model = {"id": "m", "object": "model", "created": 1, "owned_by": "vllm", "max_model_len": 4096, "parent": None}
    stub.at("/v1/models", {"object": "list", "data": [model]})
    stub.at("/version", {"version": "0.33.0"})
    stub.at("/health", {})
    stub.behaviours["/v1/completions"] = answer_probes(whole)


async def whole(exchange: Exchange) -> None:
    num = json.loads(exchange.body)["max_tokens"]
    tokens = [vllm_event([11 + i], i + 1, "length" if i + 1 == num else None) for i in range(num)]
    await exchange.events(*tokens, vllm_usage(num), DONE)


def answer_probes(then: Callable[[Exchange], Any]) -> Callable[[Exchange], Any]:
    async def behave(exchange: Exchange) -> None:
        body = json.loads(exchange.body)
        if body["request_id"].startswith("probe"):
            await whole(exchange)
        else:
            await then(exchange)

    return behave


class Heard:
    """What a group said."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.failed: dict[int, str] = {}
        self.messages: dict[int, str] = {}
        self.ended: list[int] = []
        self.reasons: dict[int, int] = {}
        self.prefilled: list[int] = []
        self.traces: list[ProfileTrace] = []

    def on_step(self, events: StepEvents) -> None:
        for group, token in zip(events.groups, events.token_ids, strict=True):
            self.tokens.setdefault(group, []).append(token)
        self.failed |= {each.group: each.reason for each in events.failed}
        self.messages |= {each.group: each.message for each in events.failed}
        self.ended += [each.group for each in events.ended]
        self.reasons |= {each.group: each.reason for each in events.ended}
        self.prefilled += [group for group, _ in events.prefilled]

    async def until(self, condition: Callable[[], object], within_s: float = 5.0) -> None:
        async with asyncio.timeout(within_s):
            while not condition():  # noqa: ASYNC110 - whatever comes next
                await asyncio.sleep(0.01)


@pytest.fixture
async def stub() -> AsyncIterator[Stub]:
    async with stub_server() as stub:
        be_vllm(stub)
        yield stub


def engines_of(
    stub: Stub, heard: Heard, bounds: RemoteBounds = QUICK, *, vocabulary: int = VOCABULARY, **more: Any
) -> RemoteEngines:
    spec = RemoteSpec(
        **{
            "address": stub.address,
            "new_client": lambda: EngineClient(EngineAddress.parse(stub.address), connect_s=1.0),
            "dialect": "auto",
            "sampler": "auto",
            "max_sequences": 4,
            "prefill_room": 512,
            "queue": QueueSettings(),
            "bounds": bounds,
            **more,
        }
    )
    events = GroupEvents(heard.on_step, heard.traces.append, lambda: False)
    return RemoteEngines(spec, EngineModel("/models/m", 2048, vocabulary), events)


@asynccontextmanager
async def started(engines: RemoteEngines) -> AsyncIterator[tuple[RemoteGroup, RankReady]]:
    group = engines.make()
    try:
        (ready,) = await group.start()
        yield group, ready
    finally:
        await group.end(graceful=True)


async def test_an_answer_comes_in_our_terms(stub: Stub) -> None:
    heard = Heard()
    async with started(engines_of(stub, heard)) as (group, ready):
        assert ready.engine == "vllm 0.33.0"
        assert ready.context_length == 2048, "the shorter of the two"
        assert not ready.continues_exactly
        group.send(asked())
        await heard.until(lambda: heard.ended)
        assert heard.tokens == {1: [11, 12, 13, 14, 15, 16, 17, 18]}
        assert group.progress()[0].phase == "idle"


async def test_a_server_that_loads_is_waited_for(stub: Stub) -> None:
    models = stub.behaviours.pop("/v1/models")
    stub.at("/v1/models", {"error": "loading"}, "503 Service Unavailable")
    heard = Heard()
    group = engines_of(stub, heard).make()
    start = asyncio.create_task(group.start())
    await asyncio.sleep(0.3)
    assert not start.done()
    stub.behaviours["/v1/models"] = models
    assert len(await asyncio.wait_for(start, 3)) == 1
    await group.end(graceful=True)


async def test_a_server_that_never_comes_is_a_failed_start_that_says_why() -> None:
    async with stub_server() as gone:
        pass
    group = engines_of(gone, Heard(), RemoteBounds(start_s=0.3, retry_s=0.05)).make()
    with pytest.raises(RanksLost, match=r"has not answered for 0\.3 s") as lost:
        await group.start()
    assert lost.value.loss.cause is LossCause.START
    await group.end(graceful=False)


async def test_a_vllm_without_our_sampler_is_refused_where_it_is_required(stub: Stub) -> None:
    group = engines_of(stub, Heard(), sampler="require").make()
    with pytest.raises(RanksLost, match="has not loaded our sampler"):
        await group.start()
    await group.end(graceful=False)


async def test_our_sampler_is_found_and_told_the_whole_request(stub: Stub) -> None:
    """A stand-in that answers probes."""
    rows = []
    told = [*SIGN, PROTOCOL, *guidance_version()]

    async def obey(exchange: Exchange) -> None:
        body = json.loads(exchange.body)
        row = unpacked(body.get("vllm_xargs"))
        if row is not None and row.probes:
            events = [vllm_event([t], i + 1, "length" if i + 1 == len(told) else None) for i, t in enumerate(told)]
            await exchange.events(*events, vllm_usage(len(told)), DONE)
            return
        rows.append((body, row))
        await whole(exchange)

    stub.behaviours["/v1/completions"] = obey
    heard = Heard()
    async with started(engines_of(stub, heard)) as (group, ready):
        assert ready.continues_exactly
        assert not {"bad_words", "constraint"} & set(ready.unsupported)
        rows.clear()
        group.send(asked(temperature=1.0, presence_penalty=0.5, top_p=0.9))
        await heard.until(lambda: heard.ended)
    ((body, row),) = rows
    assert (body["temperature"], body["presence_penalty"], body["top_p"]) == (0.0, 0.0, 1.0)
    assert row.group.sampling.presence_penalty == 0.5
    assert (row.num_prompt, row.group.prompt_ids) == (3, [])


@pytest.mark.parametrize(
    ("told", "lacks"),
    [
        ((*SIGN, PROTOCOL, 1, 7, 6), {"constraint"}),
        ((*SIGN, PROTOCOL, 0, 0, 0), {"constraint"}),
        ((*SIGN, PROTOCOL + 1, *guidance_version()), {"constraint", "bad_words"}),
        ((7, 4, 6, PROTOCOL, *guidance_version()), {"constraint", "bad_words"}),
    ],
    ids=["another llguidance", "no llguidance", "another protocol", "no sampler"],
)
async def test_a_sampler_that_is_not_as_ours_is_used_as_far_as_answers_go_on_exactly(
    stub: Stub, told: tuple[int, ...], lacks: set[str]
) -> None:
    async def obey(exchange: Exchange) -> None:
        body = json.loads(exchange.body)
        row = unpacked(body.get("vllm_xargs"))
        if row is None or not row.probes:
            await whole(exchange)
            return
        events = [vllm_event([t], i + 1, "length" if i + 1 == len(told) else None) for i, t in enumerate(told)]
        await exchange.events(*events, vllm_usage(len(told)), DONE)

    stub.behaviours["/v1/completions"] = obey
    async with started(engines_of(stub, Heard())) as (_, ready):
        assert lacks <= set(ready.unsupported)
        assert ready.continues_exactly == ("bad_words" not in lacks)
    if not ready.continues_exactly:
        with pytest.raises(RanksLost, match=r"protocol|has not loaded our sampler"):
            async with started(engines_of(stub, Heard(), sampler="require")):
                pass


@pytest.mark.parametrize("silent", [(), ("/health",), ("/health", "/v1/models")], ids=["computes", "SGLang", "frozen"])
async def test_a_server_that_answers_nobody_is_not_given_the_time_of_a_prompt(stub: Stub, silent: tuple[str, ...]) -> None:
    """How long its first prompts take is not known. SGLang's health check waits behind them: that proves nothing."""
    patient = replace(QUICK, prefill_s=30.0)
    stub.behaviours["/v1/completions"] = answer_probes(hang)
    heard = Heard()
    async with started(engines_of(stub, heard, patient)) as (group, _):
        group.send(asked())
        for path in silent:
            stub.behaviours[path] = hang
        done, _ = await asyncio.wait([group.lost], timeout=3.0)
        assert bool(done) is ("/v1/models" in silent)
        if done:
            assert group.lost.result().cause is LossCause.STALLED
            assert "answers nobody" in group.lost.result().message


async def test_tokens_that_our_sampler_has_not_decided_are_not_passed_on(stub: Stub, tmp_path: Path) -> None:
    """It has failed before: that was another group's. The first token is ours, the second one is not."""
    slot = BoardSlot(str(tmp_path / "board"), 0, 1)
    slot.fail()

    async def fail_in_the_second_step(exchange: Exchange) -> None:
        await exchange.send(EVENTS)
        for token in (11, 12, 13):
            await exchange.chunk(b"data: " + json.dumps(vllm_event([token], token - 10, None)).encode() + b"\n\n")
            await heard.until(lambda: heard.tokens)
            if token == 11:
                slot.fail()
        await exchange.gone.wait()

    stub.behaviours["/v1/completions"] = answer_probes(fail_in_the_second_step)
    heard = Heard()
    async with started(engines_of(stub, heard, board=tmp_path / "board")) as (group, _):
        group.send(asked())
        loss = await asyncio.wait_for(group.lost, 5)
        assert loss.cause is LossCause.UNSOUND
        assert "our sampler in the engine" in loss.message
        assert heard.tokens == {1: [11]}


async def hang(exchange: Exchange) -> None:
    await exchange.send(EVENTS)
    await exchange.gone.wait()


async def begin_and_hang(exchange: Exchange) -> None:
    await exchange.send(EVENTS)
    await exchange.chunk(b"data: " + json.dumps(vllm_event([11], 1, None)).encode() + b"\n\n")
    await exchange.gone.wait()


@pytest.mark.parametrize("behaviour", [hang, begin_and_hang])
async def test_silence_is_a_stall_though_its_health_says_all_is_well(stub: Stub, behaviour: Any) -> None:
    stub.behaviours["/v1/completions"] = answer_probes(behaviour)
    heard = Heard()
    engines = engines_of(stub, heard)
    async with started(engines) as (group, _):
        group.send(asked())
        loss = await asyncio.wait_for(asyncio.shield(group.lost), 3)
        assert loss.cause is LossCause.STALLED
        assert "has sent nothing for" in loss.message
        await engines.lost(loss, served=True)
    assert engines.condemned
    async with started(engines):
        assert not engines.condemned, "it answers again"


async def test_a_rank_that_is_stopped_is_a_stall_however_slow_its_first_tokens_were(stub: Stub, tmp_path: Path) -> None:
    async def slowly(exchange: Exchange) -> None:
        await exchange.send(EVENTS)
        for i in range(3):
            await exchange.chunk(b"data: " + json.dumps(vllm_event([11 + i], i + 1, None)).encode() + b"\n\n")
            await asyncio.sleep(0.25)
        await exchange.gone.wait()

    stub.behaviours["/v1/completions"] = answer_probes(slowly)
    heard, board = Heard(), tmp_path / "board"
    rank = Rank(board, 1)
    rank.does("begin")
    try:
        async with started(engines_of(stub, heard, board=board)) as (group, _):
            group.send(asked())
            await heard.until(lambda: len(heard.tokens.get(1, [])) == 2)
            os.kill(rank.process.pid, signal.SIGSTOP)
            loss = await asyncio.wait_for(asyncio.shield(group.lost), 1.5)  # ten gaps are 2.5 s
            assert (loss.cause, loss.rank) == (LossCause.STALLED, 1)
            assert "rank 1 is stopped in step 1" in loss.message
    finally:
        rank.process.kill()
        rank.process.communicate()


async def test_a_rank_that_is_stopped_while_nothing_runs_is_a_stall(stub: Stub, tmp_path: Path) -> None:
    board = tmp_path / "board"
    rank = Rank(board, 0)
    rank.does("begin", "end")
    try:
        async with started(engines_of(stub, Heard(), board=board)) as (group, _):
            os.kill(rank.process.pid, signal.SIGSTOP)
            await asyncio.sleep(0.1)
            os.kill(rank.process.pid, signal.SIGCONT)
            await asyncio.sleep(0.4)
            assert not group.lost.done(), "somebody looked at it for a moment"
            os.kill(rank.process.pid, signal.SIGSTOP)
            loss = await asyncio.wait_for(asyncio.shield(group.lost), 1.5)
            assert (loss.cause, loss.rank) == (LossCause.STALLED, 0)
            assert "computes nothing; rank 0 is stopped in step 1" in loss.message
    finally:
        rank.process.kill()
        rank.process.communicate()


async def test_a_prompt_that_takes_long_is_no_stall(stub: Stub) -> None:
    async def slowly(exchange: Exchange) -> None:
        await asyncio.sleep(0.5)
        await whole(exchange)

    stub.behaviours["/v1/completions"] = answer_probes(slowly)
    heard = Heard()
    async with started(engines_of(stub, heard)) as (group, _):
        group.send(asked())
        await heard.until(lambda: group.progress()[0].phase == "prefill")
        await heard.until(lambda: heard.ended)
        assert not group.lost.done()


async def outside(exchange: Exchange) -> None:
    await exchange.events(vllm_event([VOCABULARY], 1, None), end=False)
    await exchange.gone.wait()


async def no_json(exchange: Exchange) -> None:
    await exchange.events(b"{nonsense", end=False)
    await exchange.gone.wait()


async def too_many(exchange: Exchange) -> None:
    await exchange.events(vllm_event(list(range(11, 31)), 20, None), end=False)
    await exchange.gone.wait()


async def endless_line(exchange: Exchange) -> None:
    await exchange.send(EVENTS)
    for _ in range(64):
        await exchange.chunk(b"x" * 65536)
    await exchange.gone.wait()


@pytest.mark.parametrize("behaviour", [outside, no_json, too_many, endless_line])
async def test_nonsense_loses_the_group(stub: Stub, behaviour: Any) -> None:
    stub.behaviours["/v1/completions"] = answer_probes(behaviour)
    heard = Heard()
    async with started(engines_of(stub, heard)) as (group, _):
        group.send(asked())
        loss = await asyncio.wait_for(asyncio.shield(group.lost), 5)
        assert loss.cause is LossCause.UNSOUND


async def cut(exchange: Exchange) -> None:
    await exchange.events(vllm_event([11], 1, None), end=False)
    exchange.writer.transport.abort()


async def test_one_cut_stream_fails_alone_while_the_server_is_well(stub: Stub) -> None:
    stub.behaviours["/v1/completions"] = answer_probes(cut)
    heard = Heard()
    async with started(engines_of(stub, heard)) as (group, _):
        group.send(asked())
        await heard.until(lambda: heard.failed)
        assert heard.failed == {1: "ENGINE_UNREACHABLE"}
        await asyncio.sleep(0.3)
        assert not group.lost.done()
        stub.behaviours["/v1/completions"] = answer_probes(whole)
        group.send(asked(2))
        await heard.until(lambda: 2 in heard.ended)


async def test_a_cut_stream_of_a_server_that_is_gone_loses_the_group(stub: Stub) -> None:
    stub.behaviours["/v1/completions"] = answer_probes(cut)
    heard = Heard()
    async with started(engines_of(stub, heard)) as (group, _):
        stub.at("/health", {}, "500 Internal Server Error")
        group.send(asked())
        loss = await asyncio.wait_for(asyncio.shield(group.lost), 3)
        assert loss.cause is LossCause.DIED


async def test_an_idle_server_that_hangs_is_noticed_and_condemned(stub: Stub) -> None:
    engines = engines_of(stub, Heard())
    async with started(engines) as (group, _):
        stub.behaviours["/health"] = lambda exchange: exchange.gone.wait()  # type: ignore[assignment, return-value]
        loss = await asyncio.wait_for(asyncio.shield(group.lost), 3)
        assert loss.cause is LossCause.STALLED
        await engines.lost(loss, served=True)
    assert engines.condemned


async def test_a_lost_group_says_nothing_more(stub: Stub) -> None:
    """What it counted is forgotten with it: the counts of the next group begin anew."""
    go_on = asyncio.Event()

    async def pause(exchange: Exchange) -> None:
        await exchange.events(vllm_event([11], 1, None), end=False)
        await go_on.wait()
        await exchange.chunk(b"data: " + json.dumps(vllm_event([12], 2, None)).encode() + b"\n\n")
        await exchange.gone.wait()

    stub.behaviours["/v1/completions"] = answer_probes(pause)
    heard = Heard()
    async with started(engines_of(stub, heard, RemoteBounds(watch_interval_s=0.02))) as (group, _):
        group.send(asked())
        await heard.until(lambda: heard.tokens)
        group.on_nonsense(EngineProtocolError("as a test wants it"))
        go_on.set()
        await asyncio.sleep(0.2)
        assert heard.tokens == {1: [11]}


async def test_an_idle_server_that_dies_is_noticed(stub: Stub) -> None:
    async with started(engines_of(stub, Heard())) as (group, _):
        await asyncio.sleep(0.5)
        assert not group.lost.done()
        stub.at("/health", {}, "503 Service Unavailable")
        loss = await asyncio.wait_for(asyncio.shield(group.lost), 3)
        assert loss.cause is LossCause.DIED


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        ("400 Bad Request", "ENGINE_REFUSED"),
        ("429 Too Many Requests", "ENGINE_BUSY"),
        ("503 Service Unavailable", "ENGINE_BUSY"),
    ],
)
async def test_what_the_server_refuses_fails_alone(stub: Stub, status: str, reason: str) -> None:
    async def refuse(exchange: Exchange) -> None:
        await exchange.answer({"error": {"message": "no"}}, status)

    stub.behaviours["/v1/completions"] = answer_probes(refuse)
    heard = Heard()
    async with started(engines_of(stub, heard)) as (group, _):
        group.send(asked())
        await heard.until(lambda: heard.failed)
        assert heard.failed == {1: reason}
        assert not group.lost.done()


async def test_a_cancelled_answer_closes_its_connection(stub: Stub) -> None:
    stub.behaviours["/v1/completions"] = answer_probes(begin_and_hang)
    heard = Heard()
    slow = RemoteBounds(watch_interval_s=0.02, stall=StallBounds(min_s=20))
    async with started(engines_of(stub, heard, slow)) as (group, _):
        group.send(asked())
        await heard.until(lambda: heard.tokens)
        group.send(CancelGroup(1))
        exchange = stub.requests[-1]
        await asyncio.wait_for(exchange.gone.wait(), 2)
        assert heard.failed == {}
        assert not group.lost.done()


async def test_no_more_is_sent_at_once_than_there_are_places(stub: Stub) -> None:
    running, most = 0, 0
    release = asyncio.Event()

    async def hold(exchange: Exchange) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await release.wait()
        await whole(exchange)
        running -= 1

    stub.behaviours["/v1/completions"] = answer_probes(hold)
    heard = Heard()
    slow = RemoteBounds(watch_interval_s=0.02, prefill_s=20)
    async with started(engines_of(stub, heard, slow)) as (group, ready):
        assert ready.max_sequences == 4
        for number in range(10):
            group.send(asked(number))
        await heard.until(lambda: running == 4)
        await asyncio.sleep(0.1)
        assert most == 4
        release.set()
        await heard.until(lambda: len(heard.ended) == 10)


async def test_a_profile_is_refused_with_a_reason(stub: Stub) -> None:
    heard = Heard()
    async with started(engines_of(stub, heard)) as (group, _):
        group.send(StartProfile((0,), 5, 3))
        await heard.until(lambda: heard.traces)
        assert heard.traces[0].number == 3
        assert "profiler of its own" in heard.traces[0].error
        with pytest.raises(OSError, match="moves no pages"):
            group.slab(1)
