"""What becomes of a step's events, with the demo model's text and no process."""

import asyncio
from dataclasses import replace

import grpc
import msgspec
import pytest
import structlog
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as collector
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as collector_grpc

from ryzanstein.errors import Code, RyzansteinError, unavailable
from ryzanstein.generation.prompts import ChatPrompt, Message, Role, TokenPrompt
from ryzanstein.generation.reply_format import ReplyStyle
from ryzanstein.generation.request import Attempt, ChoiceProgress, GenerationRequest, SamplingParams
from ryzanstein.generation.tokens import FinishReason
from ryzanstein.generation.tools import Tool, ToolMode, Tools
from ryzanstein.observe.tracing import Tracing
from ryzanstein.worker.agent.intake import group_of, texts_of
from ryzanstein.worker.agent.routers import RouterLink
from ryzanstein.worker.agent.versions.generations import RunningGenerations
from ryzanstein.worker.engine.messages import CancelGroup, ChoiceEnd, EngineStats, FinishChoice, GroupFailed, StepEvents
from ryzanstein.worker.supervision.group import RankProgress
from ryzanstein.worker.telemetry import WorkerTelemetry
from ryzanstein.worker.text.grammars.enforcing import constrained
from ryzanstein.worker.tuning import LinkBounds

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
STATS = EngineStats(1, 0, 4, 0, 0, 0, 0, 0, 1)


def step(rows=(), ended=(), failed=(), logprobs=None) -> StepEvents:
    """Rows are (group, choice, token id)."""
    columns = [list(column) for column in zip(*rows, strict=True)] or [[], [], []]
    return StepEvents(1, *columns, logprobs or {}, list(ended), list(failed), STATS, 0.001)


class World:
    """One node's generations, a link, and what the engine was sent."""

    def __init__(self, model, tracing=None) -> None:
        self.model = model
        self.sent = []
        self.telemetry = WorkerTelemetry()
        self.running = RunningGenerations(self.sent.append, self.telemetry, tracing or Tracing("worker"))
        self.link = RouterLink("router-t", LinkBounds())

    async def open(self, group=1, known=None, **sampling):
        params = SamplingParams(**{"seed": 1, "max_tokens": 50, **sampling})
        generated = tuple(known or [ChoiceProgress()] * params.n)
        request = GenerationRequest("demo", TokenPrompt((5, 6)), params, traceparent=TRACEPARENT)
        attempt = Attempt("g", 0, request, generated)
        asked = group_of(attempt, group, [5, 6], self.model, 2048)
        return self.running.open(self.link, group, attempt, asked, self.model, texts=await texts_of(attempt, self.model))

    async def frame(self):
        return (await anext(self.link.frames())).output

    def ids(self, text: str) -> list[int]:
        return self.model.encode(text)


@pytest.fixture
def world(text_model):
    return World(text_model)


async def test_several_generations_share_one_frame_and_count_their_own_indices(world):
    await world.open(1)
    await world.open(2)
    a, b = world.ids("one two")[:2]
    world.running.on_step(step([(1, 0, a), (2, 0, b)]))
    world.running.on_step(step([(2, 0, a), (1, 0, b)]))
    output = await world.frame()
    assert list(zip(output.handle, output.index, output.token_id, strict=True)) == [(1, 0, a), (2, 0, b), (2, 1, a), (1, 1, b)]


async def test_the_router_learns_which_choices_were_preempted(world):
    await world.open(1, n=2)
    (a,) = world.ids("one")[:1]
    world.running.on_step(step([(1, 0, a), (1, 1, a)]))
    world.running.on_step(msgspec.structs.replace(step([(1, 0, a)]), paused=[(1, 1), (7, 0)]))
    output = await world.frame()
    assert [(preempted.handle, preempted.choice) for preempted in output.preempted] == [(1, 1)]


async def test_the_engine_runs_what_was_not_finished_before(world):
    asked = await world.open(known=[ChoiceProgress((9,)), ChoiceProgress((8, 7), finished=True)], n=2)
    assert (asked.generated, asked.finished) == ([[9], [8, 7]], [False, True])
    world.running.on_step(step([(1, 0, 10)]))
    assert list((await world.frame()).index) == [1]


async def test_after_a_stop_string_the_engine_learns_it_and_later_tokens_are_dropped(world):
    ids = world.ids("Hello there, my friend")
    await world.open(stop=("there",))
    for token_id in ids:
        world.running.on_step(step([(1, 0, token_id)]))
    assert world.sent == [FinishChoice(1, 0)]
    world.running.on_step(step(ended=[ChoiceEnd(1, 0, FinishReason.LENGTH, 16)]))
    output = await world.frame()
    assert "".join(output.text) == "Hello "
    assert len(output.text) < len(ids)
    assert [(end.reason, end.cached_prompt_tokens) for end in output.finished] == [(FinishReason.STOP, 16)]
    assert len(world.running) == 0


async def test_the_last_token_carries_all_text_that_was_held_back(world):
    ids = world.ids("Hello there")
    await world.open(stop=("there!",))
    world.running.on_step(step([(1, 0, token_id) for token_id in ids], [ChoiceEnd(1, 0, FinishReason.LENGTH, 0)]))
    output = await world.frame()
    assert "".join(output.text) == "Hello there"
    assert output.text[-1] != ""
    assert output.finished[0].reason == FinishReason.LENGTH


async def test_a_choice_that_had_stopped_before_ends_at_once(world):
    known = [ChoiceProgress(tuple(world.ids("Hello there")))]
    assert await world.open(known=known, stop=("there",)) is None
    output = await world.frame()
    assert len(output.accepted) == 1
    assert [end.reason for end in output.finished] == [FinishReason.STOP]
    assert (world.running.idle.is_set(), world.link.handles) == (True, {})


async def test_the_groups_failure_is_said_with_its_code(world):
    await world.open(1)
    await world.open(2)
    late = GroupFailed(1, int(Code.DEADLINE_EXCEEDED), "DEADLINE_EXCEEDED", "the deadline passed")
    broken = GroupFailed(2, int(Code.INTERNAL), "INTERNAL", "logits are not numbers")
    world.running.on_step(step(failed=[late, broken]))
    output = await world.frame()
    assert [(failed.code, failed.node_fault) for failed in output.failed] == [
        (Code.DEADLINE_EXCEEDED, False),
        (Code.INTERNAL, True),
    ]


async def test_a_cancelled_handle_is_silent_and_the_engine_frees_it(world):
    await world.open(1)
    world.running.on_step(msgspec.structs.replace(step(), accepted=[1]))
    world.running.cancel(world.link, 1)
    world.running.cancel(world.link, 1)
    world.running.on_step(step([(1, 0, 5)], [ChoiceEnd(1, 0, FinishReason.LENGTH, 0)]))
    assert world.sent == [CancelGroup(1)]
    assert len((await world.frame()).handle) == 0


async def test_the_end_of_a_link_cancels_its_generations_only(world):
    await world.open(1)
    other = RouterLink("router-u", LinkBounds())
    ours, world.link = world.link, other
    await world.open(2)
    world.running.close_link(ours)
    assert world.sent == [CancelGroup(1)]
    assert world.running.num_choices == 1


async def test_lost_ranks_fail_everything_by_the_nodes_fault(world):
    await world.open(1)
    await world.open(2, n=2)
    world.running.fail_all(unavailable("RANK_LOST", "rank 1 died of SIGKILL"), node_fault=True)
    output = await world.frame()
    assert [(failed.handle, failed.reason, failed.node_fault) for failed in output.failed] == [
        (1, "RANK_LOST", True),
        (2, "RANK_LOST", True),
    ]
    assert world.running.idle.is_set()


async def test_log_probabilities_have_their_tokens_texts(world):
    await world.open(logprobs=1)
    (token_id,) = world.ids("Hello")[:1]
    world.running.on_step(step([(1, 0, token_id)], logprobs={0: (-0.25, [(token_id, -0.25)])}))
    (row,) = (await world.frame()).logprobs
    text = world.model.token_text(token_id)
    assert (row.logprob, row.text, row.top[0].text) == (-0.25, text, text)
    assert row.bytes == row.top[0].bytes == text.encode()


async def test_a_token_that_is_part_of_a_character_and_a_special_one_have_their_own_bytes(world):
    await world.open(logprobs=1)
    eos = next(iter(world.model.eos_token_ids))
    parts = world.ids("\u00e4")
    assert len(parts) == 2, "the demo model has no token of its own for it"
    for token_id in (*parts, eos):
        world.running.on_step(step([(1, 0, token_id)], logprobs={0: (-0.25, [(token_id, -0.25)])}))
    rows = (await world.frame()).logprobs
    assert [row.bytes for row in rows] == [row.top[0].bytes for row in rows] == [b"\xc3", b"\xa4", b""]
    assert rows[2].text == world.model.token_text(eos) != ""


async def test_a_router_that_does_not_read_loses_its_link_and_the_engine_goes_on(world):
    world.link = RouterLink("router-t", LinkBounds(rows=3))
    await world.open(1)
    for _ in range(5):
        world.running.on_step(step([(1, 0, 5)]))
    assert world.link.closed
    assert world.sent == [CancelGroup(1)]


class Sink(collector_grpc.TraceServiceServicer):
    """A small OTLP collector: spans by name."""

    def __init__(self) -> None:
        self.spans = {}

    async def Export(self, request, context):
        scopes = [scope for resource in request.resource_spans for scope in resource.scope_spans]
        self.spans.update({span.name: span for scope in scopes for span in scope.spans})
        return collector.ExportTraceServiceResponse()


@pytest.fixture
async def sink():
    sink, server = Sink(), grpc.aio.server()
    collector_grpc.add_TraceServiceServicer_to_server(sink, server)
    sink.endpoint = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    yield sink
    await server.stop(0)


async def test_a_generation_is_a_span_of_its_requests_trace_with_its_phases_below(text_model, sink):
    tracing = Tracing("worker", sink.endpoint)
    world = World(text_model, tracing)
    await world.open(1)
    world.running.on_step(step([(1, 0, 5)]))
    world.running.on_step(step([(1, 0, 6)], [ChoiceEnd(1, 0, FinishReason.LENGTH, 0)]))
    await asyncio.to_thread(tracing.close)
    generation, prefill, decode = (sink.spans[name] for name in ("node.generation", "node.prefill", "node.decode"))
    assert {span.trace_id.hex() for span in sink.spans.values()} == {TRACEPARENT.split("-")[1]}
    assert generation.parent_span_id.hex() == TRACEPARENT.split("-")[2]
    assert prefill.parent_span_id == decode.parent_span_id == generation.span_id
    assert prefill.end_time_unix_nano <= decode.start_time_unix_nano


async def test_a_generation_is_accepted_when_the_engine_has_let_it_in_and_a_refusal_comes_alone(world):
    await world.open(1)
    await world.open(2)
    refused = GroupFailed(2, int(Code.RESOURCE_EXHAUSTED), "QUEUE_FULL", "full", {"bound": "8"}, 1.5)
    world.running.on_step(msgspec.structs.replace(step(failed=[refused]), accepted=[1]))
    output = await world.frame()
    assert [accepted.handle for accepted in output.accepted] == [1]
    (failed,) = output.failed
    assert (failed.handle, failed.reason, dict(failed.metadata)) == (2, "QUEUE_FULL", {"bound": "8"})
    assert (failed.retry_delay.ToNanoseconds(), failed.node_fault) == (1_500_000_000, False)


def test_tools_whose_grammar_would_be_too_long_are_refused(text_model):
    tools = Tools((Tool("f", "", '{"properties": {"a": {"enum": ["' + "x" * 200_000 + '"]}}}'),), ToolMode.REQUIRED)
    prompt = ChatPrompt((Message(Role.USER, "Hello"),), tools=tools)
    request = GenerationRequest("demo", prompt, SamplingParams())
    attempt = Attempt("g", 1, request, (ChoiceProgress(),))
    with pytest.raises(RyzansteinError) as refused:
        constrained(attempt, ReplyStyle("hermes"), text_model)
    assert refused.value.code is Code.INVALID_ARGUMENT
    assert refused.value.violations[0].field == "tools"


async def test_the_end_says_what_the_time_was_spent_on(world):
    lead = RankProgress(0, 7, 1, 8, "idle", 0.0, 0.0, 1, 0.01, collectives_s=1.0, compute_s=2.0, tail_s=0.0)
    after = replace(lead, collectives_s=1.5, compute_s=3.25, tail_s=0.25)
    seen = iter((lead, after))
    world.running = RunningGenerations(world.sent.append, world.telemetry, Tracing("worker"), lambda: next(seen))
    await world.open(1)
    await asyncio.sleep(0.03)
    (a,) = world.ids("one")[:1]
    with structlog.testing.capture_logs() as lines:
        world.running.on_step(msgspec.structs.replace(step(), step=4, prefilled=[(1, 1)]))
        await asyncio.sleep(0.02)
        world.running.on_step(msgspec.structs.replace(step([(1, 0, a)]), step=5))
        world.running.on_step(msgspec.structs.replace(step(ended=[ChoiceEnd(1, 0, FinishReason.LENGTH, 0)]), step=9))
    ended = next(line for line in lines if line["event"] == "generation ended")
    assert ended["queue_s"] >= 0.025
    assert ended["prefill_s"] >= 0.02
    assert ended["queue_s"] + ended["prefill_s"] + ended["decode_s"] == pytest.approx(ended["duration_s"], abs=1e-5)
    assert (ended["steps"], ended["collective_share"]) == (6, 0.25)
    value = world.telemetry.registry.get_sample_value
    for name in ("queue_seconds", "prefill_seconds", "decode_seconds", "prompt_tokens_length", "generated_tokens_length"):
        assert value(f"ryzanstein_worker_{name}_count") == 1, name


async def test_an_attempt_that_was_never_computed_was_in_the_queue_all_the_time(world):
    await world.open(1)
    with structlog.testing.capture_logs() as lines:
        world.running.cancel(world.link, 1)
    (ended,) = lines
    assert ended["queue_s"] == ended["duration_s"]
    assert not {"prefill_s", "decode_s", "steps"} & set(ended)
