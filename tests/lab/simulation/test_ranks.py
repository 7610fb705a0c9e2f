"""A real node over simulated ranks, on a loop that lets time pass instead of waiting."""

import asyncio
import functools
import gc
import os
import random
import selectors
import time
from contextlib import asynccontextmanager
from dataclasses import replace
from types import MappingProxyType

import pytest

from ryzanstein.demo import MODEL_DIR
from ryzanstein.errors import Code
from ryzanstein.generation.prompts import TokenPrompt
from ryzanstein.generation.request import Attempt, ChoiceProgress, GenerationRequest, SamplingParams
from ryzanstein.generation.tokens import FinishReason
from ryzanstein.lab.simulation.ranks.ranks import RankProfile, SimulatedRanks, StartEnd, StartFault
from ryzanstein.lab.simulation.scripted.model import ScriptedModel
from ryzanstein.observe.tracing import Tracing
from ryzanstein.worker.agent.model_host import ModelChoice
from ryzanstein.worker.agent.node import NodeAgent
from ryzanstein.worker.agent.operations import Operations
from ryzanstein.worker.config import WorkerSettings
from ryzanstein.worker.engine.messages import SubmitGroup
from ryzanstein.worker.engine.plan import StepPlan
from ryzanstein.worker.engine_choice import engines_of
from ryzanstein.worker.ranks.group import GroupBounds, RankGroup
from ryzanstein.worker.ranks.messages import RankSpec
from ryzanstein.worker.supervision.group import GroupEvents, LossCause
from ryzanstein.worker.telemetry import WorkerTelemetry
from ryzanstein.worker.text.templates.renderer import LocalRenderer

QUICK = RankProfile(
    step_s=0.0005,
    prefill_token_s=0.0,
    row_s=0.0,
    collective_s=0.02,
    start_s=0.01,
    server_s=0.005,
    fork_s=0.001,
    notice_s=0.005,
    takedown_s=0.01,
    profiler_s=0.05,
    profiler_again_s=0.01,
)
SEEDED = SamplingParams(temperature=0.8, seed=7, max_tokens=60, ignore_eos=True)
PROMPT = tuple(range(10, 50))


class Hasty(selectors.DefaultSelector):
    """Lets time pass instead of waiting, but for what another thread does."""

    def __init__(self):
        super().__init__()
        self.now_s = 1000.0

    def select(self, timeout=None):
        ready = super().select(timeout and 0)
        if not ready and timeout:
            self.now_s += timeout
        return ready


def hastily(test):
    """Runs an async test on such a loop."""

    @functools.wraps(test)
    def run(*args, **kwargs):
        selector = Hasty()
        loop = asyncio.SelectorEventLoop(selector)
        loop.time = lambda: selector.now_s
        loop._clock_resolution = 1e-9
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(time, "monotonic", loop.time)
            patch.setattr(time, "monotonic_ns", lambda: int(selector.now_s * 1e9))
            with asyncio.Runner(loop_factory=lambda: loop) as runner:
                runner.run(test(*args, **kwargs))

    return run


class Client:
    """What a link was told of each generation, by handle."""

    def __init__(self, node):
        self.node = node
        self.link = node.links.open("router-t")
        self.tokens: dict[int, list[tuple[int, int, int, str]]] = {}
        self.ends: dict[int, list[tuple[int, int, int]]] = {}
        self.failed: dict[int, object] = {}
        self.logprobs: dict[int, list[float]] = {}
        self.changed = asyncio.Event()
        self.reader = asyncio.create_task(self._read())

    async def _read(self):
        async for frame in self.link.frames():
            output = frame.output
            for row in zip(output.handle, output.choice, output.index, output.token_id, output.text, strict=True):
                self.tokens.setdefault(row[0], []).append(row[1:])
            for end in output.finished:
                self.ends.setdefault(end.handle, []).append((end.choice, end.reason, end.cached_prompt_tokens))
            for failure in output.failed:
                self.failed[failure.handle] = failure
            self.changed.set()

    async def until(self, condition, timeout_s=20):
        async with asyncio.timeout(timeout_s):
            while not condition():
                self.changed.clear()
                await self.changed.wait()

    async def submit(self, handle, sampling=SEEDED, prompt=PROMPT, generated=None, **more):
        request = GenerationRequest("", TokenPrompt(prompt), sampling, **more)
        known = generated or tuple(ChoiceProgress() for _ in range(sampling.n))
        await self.node.submissions.submit(self.link, handle, Attempt(f"g{handle}", 1, request, known))

    async def ended(self, handle):
        """All choices, or the failure."""
        await self.until(lambda: handle in self.failed or len(self.ends.get(handle, ())) > 0)
        assert handle not in self.failed, self.failed[handle]
        return self.of(handle)

    def of(self, handle, choice=0):
        rows = [row for row in self.tokens.get(handle, ()) if row[0] == choice]
        assert [row[1] for row in rows] == list(range(rows[0][1], rows[0][1] + len(rows))) if rows else True
        return [row[2] for row in rows]

    def text(self, handle):
        return "".join(row[3] for row in self.tokens[handle])


def made_node(ranks, **settings):
    settings = WorkerSettings(_env_file=None, **settings)
    engines = engines_of(settings, new_server=ranks.new_server)
    return NodeAgent(settings, WorkerTelemetry(), Tracing("worker"), LocalRenderer(), new_engines=engines)


@asynccontextmanager
async def serving(profile=QUICK, model=None, seed=1, bounds=MappingProxyType({}), **settings):
    """A ready node, its ranks, and a router's link to it; afterwards nothing is left."""
    ranks = SimulatedRanks(random.Random(seed), profile, model)
    ranks_bounds = {"watch_interval_s": 0.01, "stall": {"min_s": 0.15}, **bounds}
    settings = {"tp": 2, "tuning": {"ranks": ranks_bounds, "recovery": {"first_s": 0.01}}, **settings}
    node = made_node(ranks, **settings)
    choice = ModelChoice.at(str(MODEL_DIR))
    await node.host.load(choice)
    await node.host.settled(choice)
    client = Client(node)
    try:
        yield node, ranks, client
    finally:
        client.link.close()
        await client.reader
        await node.host.unload()
        assert ranks.left == []
        assert ranks.unexpected == []


def expected(ranks, sampling=SEEDED, prompt=PROMPT, choice=0):
    return ranks.model.expected(prompt, sampling, ranks.profile.context_length, choice=choice)


async def again(node):
    """Ready after a loss."""
    await asyncio.wait_for(node.host.settled(node.host.choice), 10)


@pytest.mark.parametrize("tp", [1, 3])
@pytest.mark.parametrize(
    "sampling",
    [
        SEEDED,
        SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True),
        SamplingParams(temperature=1.0, seed=2**64 - 1, top_p=0.5, logit_bias=((3, 1.5),), max_tokens=300),
        SamplingParams(temperature=1.0, seed=3, min_tokens=200, max_tokens=1000, stop_token_ids=(77, 78, 90)),
        SamplingParams(temperature=1.0, seed=5, max_tokens=300, stop=("er", " cat", "7"), ignore_eos=True),
        SamplingParams(temperature=1.0, seed=5, max_tokens=1),
    ],
)
@hastily
async def test_a_node_answers_as_the_script_says(tp, sampling):
    async with serving(tp=tp) as (_, ranks, client):
        await client.submit(1, sampling)
        tokens = await client.ended(1)
        answer = expected(ranks, sampling)
        assert tokens == answer.token_ids
        assert client.text(1) == answer.text
        assert client.ends[1][0][1] == answer.reason


@hastily
async def test_answers_end_by_stop_sometimes_and_by_length_sometimes():
    model = ScriptedModel.demo(eos_every=50)
    reasons = [
        model.expected(PROMPT, SamplingParams(temperature=1.0, seed=seed, max_tokens=50), 4096).reason for seed in range(40)
    ]
    assert 5 < reasons.count(FinishReason.STOP) < 35


@hastily
async def test_choices_differ_and_each_is_the_scripts():
    async with serving() as (_, ranks, client):
        sampling = replace(SEEDED, n=3)
        await client.submit(1, sampling)
        await client.until(lambda: len(client.ends.get(1, ())) == 3)
        answers = [client.of(1, choice) for choice in range(3)]
        assert answers == [expected(ranks, sampling, choice=choice).token_ids for choice in range(3)]
        assert answers[0] != answers[1]


@hastily
async def test_log_probabilities_come_with_the_tokens():
    async with serving() as (_, ranks, client):
        sampling = replace(SEEDED, logprobs=3, max_tokens=5)
        await client.submit(1, sampling)
        assert await client.ended(1) == expected(ranks, sampling).token_ids
        assert all(len(token.top) == 3 and token.top[0][0] == token.token_id for token in expected(ranks, sampling).tokens)


@hastily
async def test_an_answer_is_continued_at_any_index():
    async with serving() as (_, ranks, client):
        whole = expected(ranks).token_ids
        for cut in (1, 15, 16, 17, 59):
            await client.submit(cut, generated=(ChoiceProgress(tuple(whole[:cut])),))
            assert await client.ended(cut) == whole[cut:]
            assert client.tokens[cut][0][1] == cut


@pytest.mark.parametrize("change", ["lost", "repeated", "other", "prompt", "seed", "parameter"])
@hastily
async def test_a_wrong_history_makes_a_wrong_answer(change):
    async with serving() as (_, ranks, client):
        whole = expected(ranks).token_ids
        known, prompt, sampling = list(whole[:20]), PROMPT, SEEDED
        match change:
            case "lost":
                del known[5]
            case "repeated":
                known.insert(5, known[5])
            case "other":
                known[5] = known[5] ^ 1
            case "prompt":
                prompt = (*PROMPT[:-1], 3)
            case "seed":
                sampling = replace(SEEDED, seed=8)
            case "parameter":
                sampling = replace(SEEDED, top_p=0.9)
        await client.submit(1, sampling, prompt, (ChoiceProgress(tuple(known)),))
        tokens = await client.ended(1)
        assert sum(a == b for a, b in zip(tokens, whole[len(known) :], strict=False)) < 5


@hastily
async def test_company_prefix_reuse_and_chunks_change_nothing():
    async with serving(max_sequences=8, max_tokens_per_step=16, num_blocks=256) as (_, ranks, client):
        prompts = [PROMPT + tuple(range(60, 60 + 5 * i)) for i in range(12)]
        for handle, prompt in enumerate(prompts, 1):
            await client.submit(handle, prompt=prompt)
        await client.submit(99, prompt=prompts[0])
        for handle, prompt in enumerate(prompts, 1):
            assert await client.ended(handle) == expected(ranks, prompt=prompt).token_ids
        await client.submit(100, prompt=prompts[-1])
        assert await client.ended(100) == expected(ranks, prompt=prompts[-1]).token_ids
        assert client.ends[100][0][2] > 64


@hastily
async def test_preemption_changes_nothing():
    async with serving(max_sequences=8, max_tokens_per_step=64, num_blocks=24) as (node, ranks, client):
        sampling = replace(SEEDED, max_tokens=150)
        for handle in range(1, 7):
            await client.submit(handle, sampling, prompt=(handle, *PROMPT))
        for handle in range(1, 7):
            assert await client.ended(handle) == expected(ranks, sampling, (handle, *PROMPT)).token_ids
        assert node.version.stats.preemptions > 0


def _swapped(plan: StepPlan) -> StepPlan:
    """The first two blocks of each table."""
    return StepPlan(
        plan.step,
        plan.token_ids,
        plan.num_new,
        plan.num_context,
        [[table[1], table[0], *table[2:]] if context > 40 else table for table, context in _tables(plan)],
        plan.sampled,
        plan.full_logits,
    )


def _tables(plan):
    return zip(plan.block_tables, plan.num_context, strict=True)


@hastily
async def test_a_corrupted_block_table_makes_a_wrong_answer():
    async with serving() as (_, ranks, client):
        ranks.tamper(_swapped)
        await client.submit(1)
        tokens, answer = await client.ended(1), expected(ranks).token_ids
        assert tokens[0] == answer[0]
        assert sum(a == b for a, b in zip(tokens, answer, strict=True)) < 6


@hastily
async def test_a_block_that_is_given_to_two_makes_a_wrong_answer():
    """As when it is freed too early: the other one's keys are in it."""
    async with serving() as (_, ranks, client):
        tables: dict[int, list[int]] = {}

        def share(plan: StepPlan) -> StepPlan:
            for context, table in zip(plan.num_context, plan.block_tables, strict=True):
                tables.setdefault(plan.step if context == 0 else 0, list(table))
            first = next(iter(tables.values()))
            new = [[first[0], *table[1:]] if plan.step > 3 else table for table in plan.block_tables]
            return StepPlan(plan.step, plan.token_ids, plan.num_new, plan.num_context, new, plan.sampled, plan.full_logits)

        ranks.tamper(share)
        await client.submit(1)
        await client.until(lambda: len(client.of(1)) > 5)
        await client.submit(2, prompt=(99, *PROMPT))
        first, second = await client.ended(1), await client.ended(2)
        assert first != expected(ranks).token_ids
        assert second == expected(ranks, prompt=(99, *PROMPT)).token_ids


@pytest.mark.parametrize("rank", [0, 1])
@hastily
async def test_a_killed_rank_is_recovered(rank):
    async with serving(tp=3) as (node, ranks, client):
        sampling = replace(SEEDED, max_tokens=5000)
        await client.submit(1, sampling)
        await client.until(lambda: len(client.of(1)) > 20)
        assert ranks.kill(rank)
        await client.until(lambda: 1 in client.failed)
        assert (client.failed[1].code, client.failed[1].reason) == (Code.UNAVAILABLE, "RANK_LOST")
        assert node.host.recent_losses[-1][1].rank == rank
        await again(node)
        assert ranks.running == [0, 1, 2]
        known = tuple(client.of(1))
        await client.submit(2, sampling, generated=(ChoiceProgress(known),))
        await client.until(lambda: len(client.of(2)) > 20)
        assert [*known, *client.of(2)][:5000] == expected(ranks, sampling).token_ids[: len(known) + len(client.of(2))]


@pytest.mark.parametrize(("stroke", "tp"), [("stop", 2), ("hang", 2), ("hang", 1), ("stop", 1)])
@hastily
async def test_a_rank_that_does_not_move_is_found_by_the_watchdog(stroke, tp):
    async with serving(tp=tp) as (node, ranks, client):
        await client.submit(1, replace(SEEDED, max_tokens=100_000))
        await client.until(lambda: len(client.of(1)) > 20)
        assert getattr(ranks, stroke)(tp - 1)
        await client.until(lambda: 1 in client.failed)
        loss = node.host.recent_losses[-1][1]
        assert (loss.rank, loss.cause) == (tp - 1, LossCause.STALLED)
        await again(node)
        assert ranks.running == list(range(tp))


@hastily
async def test_a_rank_that_is_stopped_for_a_moment_goes_on():
    async with serving(bounds={"stall": {"min_s": 30}}) as (node, ranks, client):
        await client.submit(1)
        await client.until(lambda: len(client.of(1)) > 5)
        ranks.stop(1)
        await asyncio.sleep(0.05)
        num = len(client.of(1))
        await asyncio.sleep(0.05)
        assert len(client.of(1)) == num < 60
        progress = node.host.serving.group.progress()
        assert (progress[0].phase, progress[1].phase) == ("all_reduce", "forward")
        assert progress[0].collective == progress[1].collective + 1
        ranks.resume(1)
        assert await client.ended(1) == expected(ranks).token_ids
        assert node.host.losses == 0


@hastily
async def test_a_slow_rank_is_named_and_its_group_started_again():
    # Each judgement takes a second of the wall clock.
    async with serving(bounds={"slow": {"warn_s": 1.5, "restart_s": 1.8}}, tp=3) as (node, ranks, client):
        await client.submit(1, replace(SEEDED, max_tokens=100_000))
        ranks.slow(2, 8.0)
        await client.until(lambda: 1 in client.failed)
        loss = node.host.recent_losses[-1][1]
        assert (loss.rank, loss.cause) == (2, LossCause.SLOW)


@hastily
async def test_a_crash_says_its_message_and_unsound_ranks_are_lost_as_that():
    async with serving() as (node, ranks, client):
        await client.submit(1, replace(SEEDED, max_tokens=10_000))
        await client.until(lambda: len(client.of(1)) > 5)
        assert ranks.crash(1, "ValueError: it is broken")
        await client.until(lambda: 1 in client.failed)
        assert node.host.recent_losses[-1][1].message == "rank 1 failed: ValueError: it is broken"
        await again(node)
        ranks.faults.steps.unsound = True
        await client.submit(2)
        await client.until(lambda: 2 in client.failed)
        assert node.host.recent_losses[-1][1].cause is LossCause.UNSOUND
        ranks.faults.steps.unsound = False
        await again(node)


@hastily
async def test_want_of_memory_is_retried_smaller_and_changes_nothing():
    async with serving() as (node, ranks, client):
        ranks.faults.steps.over_tokens = 24
        await client.submit(1)
        await client.submit(2, prompt=(5, *PROMPT))
        assert await client.ended(1) == expected(ranks).token_ids
        assert await client.ended(2) == expected(ranks, prompt=(5, *PROMPT)).token_ids
        ranks.out_of_memory(50)
        await client.submit(3)
        await client.until(lambda: 3 in client.failed)
        assert client.failed[3].reason == "OUT_OF_MEMORY"
        assert node.version.stats.memory_retries > 1
        assert node.host.losses == 0


@hastily
async def test_logits_that_are_no_numbers_fail_one_request_and_change_no_other():
    model = ScriptedModel.demo(broken_id=9)
    async with serving(model=model) as (node, ranks, client):
        sampling = replace(SEEDED, max_tokens=200, stop_token_ids=())
        clean = next(seed for seed in range(99) if 9 not in expected(ranks, replace(sampling, seed=seed)).token_ids)
        sampling = replace(sampling, seed=clean)
        await client.submit(1, sampling)
        await client.until(lambda: len(client.of(1)) > 5)
        await client.submit(2, prompt=(3, 9, 4))
        await client.until(lambda: 2 in client.failed)
        assert client.failed[2].reason == "LOGITS_NOT_FINITE"
        assert await client.ended(1) == expected(ranks, sampling).token_ids
        ranks.not_finite()
        await client.submit(3)
        await client.until(lambda: 3 in client.failed)
        assert node.host.losses == 0


@pytest.mark.parametrize("end", [StartEnd.CRASH, StartEnd.KILLED, None])
@hastily
async def test_a_start_that_fails_is_tried_again(end):
    async with serving(bounds={"start_s": 0.5}) as (node, ranks, client):
        ranks.fail_next_start(StartFault(1, 0.0 if end else 5.0, end))
        ranks.kill(0)
        await client.until(lambda: True)
        await asyncio.sleep(0.03)
        await again(node)
        assert [loss.cause for _, loss in node.host.recent_losses] == [
            LossCause.DIED,
            LossCause.DIED if end else LossCause.START,
        ]


@hastily
async def test_a_model_that_is_refused_is_not_tried_again():
    async with serving() as (node, ranks, _):
        ranks.faults.refused = "lm_head.weight has the wrong shape"
        ranks.kill(1)
        await asyncio.sleep(0.05)
        with pytest.raises(Exception, match="wrong shape"):
            await again(node)


@hastily
async def test_the_fork_server_can_die_too():
    async with serving() as (node, ranks, client):
        await client.submit(1, replace(SEEDED, max_tokens=10_000))
        await client.until(lambda: len(client.of(1)) > 5)
        assert ranks.kill_server()
        await client.until(lambda: 1 in client.failed)
        assert "fork server died of SIGKILL" in client.failed[1].message
        await again(node)
        assert await _answer(client, 2) == expected(ranks).token_ids


async def _answer(client, handle):
    await client.submit(handle)
    return await client.ended(handle)


@hastily
async def test_a_profile_is_recorded_while_an_answer_goes_on():
    async with serving(profile=replace(QUICK, profiler_s=0.4)) as (node, ranks, client):
        operations = Operations(node)
        await client.submit(1, replace(SEEDED, max_tokens=2000))
        await client.until(lambda: len(client.of(1)) > 5)
        assert b"traceEvents" in await operations.profile(1, 3)
        assert b"traceEvents" in await operations.profile(0, 3)
        assert await client.ended(1) == expected(ranks, replace(SEEDED, max_tokens=2000)).token_ids


@hastily
async def test_the_context_is_what_the_profile_and_the_blocks_allow():
    async with serving(profile=replace(QUICK, context_length=300, num_blocks=32)) as (node, _, client):
        assert node.host.serving.context_length == 300
        await client.submit(1, replace(SEEDED, max_tokens=290))
        await client.until(lambda: 1 in client.failed)
        assert client.failed[1].reason == "CONTEXT_TOO_LONG"
    async with serving(num_blocks=8) as (node, _, _):
        assert node.host.serving.context_length == 128


@hastily
async def test_an_agent_that_is_killed_leaves_nothing_and_learns_nothing():
    descriptors = len(os.listdir("/proc/self/fd"))
    ranks = SimulatedRanks(random.Random(1), QUICK)
    for _ in range(20):
        node = made_node(ranks, tp=3)
        await node.host.load(ModelChoice.at(str(MODEL_DIR)))
        await node.host.settled(node.host.choice)
        client = Client(node)
        await client.submit(1, replace(SEEDED, max_tokens=10_000))
        await client.until(lambda client=client: len(client.of(1)) > 5)
        team = ranks._team
        ranks.agent_died()
        assert ranks.left == []
        num = len(client.of(1))
        await asyncio.sleep(0.01)
        assert len(client.of(1)) == num
        assert node.host.losses == 0
        # A loop for which the agent is dead never runs it again; this one has to let it end.
        for rank in team.ranks:
            rank.process.ended(-9)
        client.reader.cancel()
        await node.host.unload()
    del node, client
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= descriptors + 3


@hastily
async def test_the_same_seed_gives_the_same_run():
    def run(seed):
        ranks = SimulatedRanks(random.Random(seed), RankProfile())
        return [ranks._parts.rng.random() for _ in range(3)]

    assert run(5) == run(5)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("tp", [1, 2])
@hastily
@pytest.mark.long
async def test_long_answers_are_cheap(tp):
    """What ranks and group cost is printed; no bound, which a busy machine would break."""
    ranks = SimulatedRanks(random.Random(1), RankProfile())
    rows, over = [], asyncio.get_running_loop().create_future()

    def on_step(events):
        rows.extend(events.token_ids)
        if events.ended:
            over.set_result(None)

    server = ranks.new_server((), {}, 0)
    group = RankGroup(RankSpec("m", tp), GroupBounds(), GroupEvents(on_step, lambda trace: None, lambda: True), server)
    await group.start()
    sampling = replace(SEEDED, max_tokens=20_000)
    began, simulated = time.process_time(), time.monotonic()
    group.send(SubmitGroup(1, list(PROMPT), sampling, sampling.max_tokens, [], [[]], [False]))
    await over
    cost_s, simulated_s = time.process_time() - began, time.monotonic() - simulated
    assert rows == expected(ranks, sampling).token_ids
    print(f"tp {tp}: {cost_s * 50:.0f} us of processor time per step, {simulated_s / cost_s:.0f} seconds simulated in one")
    await group.end(graceful=False)
    await server.close()
    assert ranks.left == []
