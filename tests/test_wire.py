"""Domain values survive the wire unchanged, and what cannot be meant is refused by name."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ryzanstein import clock
from ryzanstein.cluster import (
    OWN_ENGINE,
    Beat,
    Deployment,
    EngineTraits,
    Instruction,
    Load,
    LoadProgress,
    MemberAddresses,
    ModelNeed,
    ModelReport,
    Node,
    NodeReport,
    NodeState,
    Numerics,
)
from ryzanstein.constraints import MAX_CONSTRAINT_BYTES, Constraint
from ryzanstein.errors import Code, RyzansteinError
from ryzanstein.generation.prompts import ChatPrompt, Message, Role, TemplateOptions, TextPrompt, TokenPrompt, ToolCall
from ryzanstein.generation.request import AdapterRef, Attempt, ChoiceProgress, GenerationRequest, NodePlace, SamplingParams
from ryzanstein.generation.tokens import (
    Delta,
    Finished,
    FinishReason,
    PromptScores,
    PromptToken,
    Started,
    Token,
    TokenLogprobs,
    TopLogprob,
    Usage,
)
from ryzanstein.v1 import inference_pb2 as inference
from ryzanstein.v1 import orchestrator_pb2 as orchestrator
from ryzanstein.v1 import worker_pb2 as worker
from ryzanstein.wire.attempts import attempt_from_wire, attempt_to_wire, submit_now
from ryzanstein.wire.events import event_from_wire, event_to_wire, logprobs_from_wire
from ryzanstein.wire.membership import (
    beat_from_wire,
    beat_to_wire,
    deployment_from_wire,
    deployment_to_wire,
    heartbeat_to_wire,
    instruction_from_wire,
    instruction_to_wire,
    node_from_wire,
    node_report_from_wire,
    node_to_wire,
)
from ryzanstein.wire.requests import MostParts, chat_from_wire, complete_from_wire, sampling_from_wire, sampling_to_wire

uint32 = st.integers(0, 2**32 - 1)
halves = st.integers(-4, 4).map(lambda n: n / 2)
texts = st.text(max_size=20)


constraints = st.builds(
    replace,
    st.just(Constraint.json_object())
    | st.builds(Constraint.json_schema, st.text(min_size=1, max_size=20))
    | st.builds(Constraint.regex, st.text(min_size=1, max_size=20))
    | st.builds(Constraint.grammar, st.text(min_size=1, max_size=20))
    | st.lists(st.text(min_size=1, max_size=5), min_size=1, max_size=4).map(Constraint.choice),
    after=st.text(max_size=8),
)


@st.composite
def sampling_params(draw: st.DrawFn) -> SamplingParams:
    """Valid parameters; floats that a 32-bit float holds exactly."""
    return SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.5, 1.0, 2.0])),
        top_p=draw(st.sampled_from([0.25, 0.5, 1.0])),
        top_k=draw(st.integers(0, 1000)),
        min_p=draw(st.sampled_from([0.0, 0.125, 1.0])),
        repetition_penalty=draw(st.sampled_from([0.5, 1.0, 1.25])),
        presence_penalty=draw(halves),
        frequency_penalty=draw(halves),
        seed=draw(st.none() | st.integers(0, 2**64 - 1)),
        max_tokens=draw(st.none() | st.integers(100, 10_000)),
        min_tokens=draw(st.integers(0, 100)),
        stop=tuple(draw(st.lists(st.text(min_size=1, max_size=5), max_size=3))),
        stop_token_ids=tuple(draw(st.lists(uint32, max_size=3))),
        logit_bias=tuple(sorted(draw(st.dictionaries(uint32, halves, max_size=3)).items())),
        logprobs=draw(st.none() | st.integers(0, 20)),
        n=draw(st.integers(1, 4)),
        ignore_eos=draw(st.booleans()),
        constraint=draw(st.none() | constraints),
    )


call_ids = st.from_regex(r"[!-~]{1,8}", fullmatch=True)
calls = st.builds(ToolCall, call_ids, st.from_regex(r"[A-Za-z0-9_.-]{1,8}", fullmatch=True), texts)
names = st.just("") | st.from_regex(r"[a-z]{1,4}", fullmatch=True)
messages = (
    st.builds(Message, st.sampled_from([Role.SYSTEM, Role.USER, Role.ASSISTANT]), texts, name=names)
    | st.builds(Message, st.just(Role.TOOL), texts, tool_call_id=call_ids, name=names)
    | st.builds(Message, st.just(Role.ASSISTANT), texts, st.lists(calls, max_size=3).map(tuple), name=names, reasoning=texts)
)
prompts = (
    st.lists(messages, max_size=3).map(lambda m: ChatPrompt(tuple(m)))
    | texts.map(TextPrompt)
    | st.lists(uint32, max_size=5).map(lambda ids: TokenPrompt(tuple(ids)))
)


@st.composite
def attempts(draw: st.DrawFn) -> Attempt:
    sampling = draw(sampling_params())
    progress = st.builds(ChoiceProgress, st.lists(uint32, max_size=3).map(tuple), st.booleans())
    request = GenerationRequest(
        model=draw(texts),
        prompt=draw(prompts),
        sampling=sampling,
        deadline=draw(st.none() | st.integers(0, 2**31).map(float)),
        priority=draw(st.integers(-10, 10)),
        tenant=draw(texts),
        cache_scope=draw(texts),
        adapter=draw(st.none() | st.builds(AdapterRef, texts.filter(bool), st.binary(min_size=32, max_size=32))),
        request_id=draw(texts),
        traceparent=draw(texts),
    )
    generated = draw(st.lists(progress, min_size=sampling.n, max_size=sampling.n))
    places = st.none() | st.builds(NodePlace, texts, st.just("10.0.0.1:50061"))
    moved = draw(places), draw(places), draw(st.binary(max_size=16))
    return Attempt(draw(texts), draw(uint32), request, tuple(generated), draw(st.booleans()), *moved)


@given(attempts())
def test_an_attempt_survives_the_wire(attempt: Attempt) -> None:
    packed = attempt_to_wire(attempt, handle=7).SerializeToString()
    submit = worker.Submit.FromString(packed)
    assert submit.handle == 7
    assert attempt_from_wire(submit) == attempt


@pytest.mark.parametrize(
    ("wire", "field"),
    [
        (inference.Constraint(), "sampling.constraint"),
        (inference.Constraint(json_object=False), "sampling.constraint"),
        (inference.Constraint(json_schema=""), "sampling.constraint.json_schema"),
        (inference.Constraint(regex="x" * (MAX_CONSTRAINT_BYTES + 1)), "sampling.constraint.regex"),
        (inference.Constraint(grammar="é" * (MAX_CONSTRAINT_BYTES // 2 + 1)), "sampling.constraint.grammar"),
        (inference.Constraint(choice=inference.ConstraintChoices()), "sampling.constraint.choice"),
        (inference.Constraint(choice=inference.ConstraintChoices(choices=["a", ""])), "sampling.constraint.choice"),
        (inference.Constraint(choice=inference.ConstraintChoices(choices=["a"] * 1025)), "sampling.constraint.choice"),
        (inference.Constraint(json_object=True, after="x" * 65), "sampling.constraint.after"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_constraint_out_of_its_bounds_is_refused_by_name(wire: inference.Constraint, field: str) -> None:
    with pytest.raises(RyzansteinError) as refused:
        sampling_from_wire(inference.SamplingParams(constraint=wire))
    assert refused.value.code is Code.INVALID_ARGUMENT
    assert refused.value.violations[0].field == field


def test_a_node_goes_by_the_time_that_is_left_and_not_by_its_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    now = clock.unix_s()
    attempt = Attempt("g", 0, GenerationRequest("m", TextPrompt("x"), SamplingParams(seed=1), deadline=now + 60), ())
    submit = submit_now(attempt, 1)
    assert 59 < submit.time_left.ToNanoseconds() / 1e9 <= 60
    for offset_s in (3600.0, -3600.0):
        monkeypatch.setattr(clock, "unix_s", lambda offset_s=offset_s: now + offset_s)
        deadline = attempt_from_wire(submit).request.deadline
        assert deadline == pytest.approx(now + offset_s + 60, abs=1)


def test_a_wall_clock_that_is_set_moves_no_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    wall = time.time()
    before = clock.unix_s()
    monkeypatch.setattr(time, "time", lambda: wall + 3600)
    assert clock.unix_s() == pytest.approx(before, abs=1)
    assert before == pytest.approx(wall, abs=1)


uint64 = st.integers(0, 2**64 - 1)
loads = st.builds(Load, uint32, uint32, uint32, uint32, uint32)
states = st.sampled_from(NodeState)
reports = st.builds(
    ModelReport,
    texts,
    texts,
    uint64,
    states,
    uint32,
    loads,
    texts,
    uint64,
    st.booleans(),
    st.booleans(),
    uint64,
    states,
    texts,
    st.none() | st.builds(LoadProgress, st.sampled_from(("", "load", "pack", "warm_up")), uint64, uint64, uint64, uint64),
)
deployments = st.builds(Deployment, texts, texts, uint32, uint64, st.integers(0, 2**31).map(lambda halves: halves / 2))
nodes = st.builds(
    Node,
    node_id=texts,
    address=texts,
    incarnation=texts,
    tp=uint32,
    state=states,
    model=texts,
    context_length=uint32,
    load=loads,
    drain_requested=st.booleans(),
    join_time=st.integers(0, 2**31).map(float),
    beat_time=st.integers(0, 2**31).map(float),
    models=st.lists(reports, max_size=3).map(tuple),
    memory_bytes=uint64,
)


@given(nodes)
def test_a_node_survives_the_wire(node: Node) -> None:
    assert node_from_wire(node_to_wire(node)) == node


node_reports = st.builds(
    NodeReport,
    st.none() | st.builds(Beat, uint32, states, texts),
    st.lists(reports, max_size=3).map(tuple),
    uint64,
    st.lists(st.builds(ModelNeed, texts, uint64, texts), max_size=3).map(tuple),
    st.none() | st.binary(max_size=8),
    starts=st.dictionaries(texts, uint64, max_size=3),
    takes_member_changes=st.booleans(),
)


@given(node_reports)
def test_a_node_report_survives_the_wire(report: NodeReport) -> None:
    packed = heartbeat_to_wire("a", "lease", report).SerializeToString()
    request = orchestrator.HeartbeatRequest.FromString(packed)
    assert (request.node_id, request.lease_id) == ("a", "lease")
    assert node_report_from_wire(request) == report


addresses = st.lists(texts, max_size=3).map(tuple)
members = st.builds(MemberAddresses, st.binary(max_size=8), addresses, st.binary(max_size=8), addresses)


@given(st.lists(deployments, max_size=3).map(tuple), st.booleans(), st.lists(texts, max_size=3).map(tuple), st.none() | members)
def test_an_instruction_survives_the_wire_and_an_older_node_reads_its_first_deployment(
    wanted: tuple[Deployment, ...], drain: bool, paths: tuple[str, ...], members: MemberAddresses | None
) -> None:
    wire = instruction_to_wire(Instruction(wanted, drain, paths, members=members))
    assert instruction_from_wire(wire) == Instruction(wanted, drain, paths, members=members)
    assert (deployment_from_wire(wire.deployment) if wire.HasField("deployment") else None) == (wanted[0] if wanted else None)


def test_the_answer_of_an_older_orchestrator_has_one_deployment() -> None:
    wire = orchestrator.HeartbeatResponse(deployment=orchestrator.Deployment(model="m", path="/m"))
    assert instruction_from_wire(wire) == Instruction((Deployment("m", "/m"),), plural=False)


def test_a_beat_and_a_deployment_survive_the_wire() -> None:
    beat = Beat(3, NodeState.RECOVERING, "demo", 2048, Load(1, 2, 3, 4, 5), 99, "rank 1 died", profiling=True)
    beat = replace(beat, numerics=Numerics("dtype=float32", b"d" * 32), reserve=True)
    beat = replace(beat, engine=EngineTraits("llama.cpp b7200", frozenset({"constraint", "min_p"}), continues_exactly=False))
    deployment = Deployment("demo", "/models/demo", 2)
    assert beat_from_wire(beat_to_wire(beat)) == beat
    assert deployment_from_wire(deployment_to_wire(deployment)) == deployment


def test_the_beat_of_an_older_node_has_an_engine_that_can_do_everything() -> None:
    beat = beat_from_wire(worker.Beat(sequence=1))
    assert (beat.engine, beat.reserve) == (OWN_ENGINE, False)
    assert OWN_ENGINE.continues_exactly


def test_what_a_hostile_node_says_of_its_engine_is_bounded() -> None:
    names = ["", "x" * 65, "constraint", *(f"field_{n}" for n in range(1000))]
    engine = beat_from_wire(worker.Beat(engine="e" * 10_000, unsupported=names)).engine
    assert engine.name == "e" * 128
    assert engine.unsupported == {"constraint", *(f"field_{n}" for n in range(61))}


def test_absent_sampling_parameters_take_their_defaults_and_zero_is_a_value() -> None:
    assert sampling_from_wire(inference.SamplingParams()) == SamplingParams()
    given_zero = sampling_from_wire(inference.SamplingParams(temperature=0, seed=0, logprobs=0))
    assert (given_zero.temperature, given_zero.seed, given_zero.logprobs) == (0.0, 0, 0)


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (inference.ChatRequest(), "messages"),
        (inference.ChatRequest(messages=[inference.Message(content="x")]), "messages[0].role"),
        (inference.ChatRequest(messages=[inference.Message(role=2)], session_id="s" * 129), "session_id"),
        (inference.ChatRequest(messages=[inference.Message(role=2)], model="m" * 129), "model"),
        (inference.ChatRequest(messages=[inference.Message(role=2)], user="u" * 16_385), "user"),
        (
            inference.ChatRequest(
                messages=[inference.Message(role=2)], sampling=inference.SamplingParams(temperature=float("inf"))
            ),
            "sampling.temperature",
        ),
        (
            inference.ChatRequest(messages=[inference.Message(role=2)], sampling=inference.SamplingParams(top_k=0)),
            "sampling.top_k",
        ),
    ],
)
def test_a_bad_chat_request_is_refused_naming_the_field(request_: inference.ChatRequest, field: str) -> None:
    with pytest.raises(RyzansteinError) as caught:
        chat_from_wire(request_)
    assert caught.value.code is Code.INVALID_ARGUMENT
    assert caught.value.violations[0].field == field


@pytest.mark.parametrize("request_", [inference.CompleteRequest(), inference.CompleteRequest(token_ids=inference.TokenIds())])
def test_an_empty_completion_prompt_is_refused(request_: inference.CompleteRequest) -> None:
    with pytest.raises(RyzansteinError, match="must"):
        complete_from_wire(request_)


def test_events_carry_indices_text_logprobs_and_usage_to_the_client() -> None:
    tokens = (
        Token(5, "he", TokenLogprobs(-0.5, (TopLogprob(5, "he", -0.5, b"h\xc3"),), "he", b"")),
        Token(6, "y", TokenLogprobs(-1.0)),
    )
    delta = event_to_wire(Delta(1, 4, tokens, "node-0")).delta
    assert (delta.choice, delta.first_index, list(delta.token_ids), delta.text) == (1, 4, [5, 6], "hey")
    assert [logprob.logprob for logprob in delta.logprobs] == [-0.5, -1.0]
    assert delta.logprobs[0].top[0].text == "he"
    assert [logprobs_from_wire(logprobs) for logprobs in delta.logprobs] == [token.logprobs for token in tokens]
    started = event_to_wire(Started("g", "m", "node-0", 9)).started
    assert (started.generation_id, started.prompt_tokens) == ("g", 9)
    finished = event_to_wire(Finished(1, FinishReason.LENGTH, Usage(9, 2, 8))).finished
    assert finished.finish_reason == inference.FINISH_REASON_LENGTH
    assert (finished.usage.prompt_tokens, finished.usage.completion_tokens, finished.usage.cached_prompt_tokens) == (9, 2, 8)


def test_parts_are_counted_before_any_is_converted() -> None:
    """The first message has no role, which is found when it is converted."""
    most = MostParts(messages=8, token_ids=16)
    with pytest.raises(RyzansteinError, match="at most 8 messages") as caught:
        chat_from_wire(inference.ChatRequest(messages=[inference.Message()] * 9), most)
    assert caught.value.violations[0].field == "messages"
    with pytest.raises(RyzansteinError, match="at most 16 ids"):
        complete_from_wire(inference.CompleteRequest(token_ids=inference.TokenIds(ids=range(17))), most)
    with pytest.raises(RyzansteinError, match=r"sampling.stop_token_ids: must have at most 64 entries, got 1000000"):
        sampling_from_wire(inference.SamplingParams(stop_token_ids=range(1_000_000)))


def test_a_conversation_of_plain_messages_is_sent_as_earlier_versions_know_it() -> None:
    """And one with more is sent apart, so that such a peer refuses it instead of reading a part of it."""
    plain = ChatPrompt((Message(Role.USER, "hi"), Message(Role.ASSISTANT, "hello")))
    more = ChatPrompt((*plain.messages, Message(Role.USER, "hi", name="ann")))
    requests = [GenerationRequest("m", prompt, SamplingParams(seed=1)) for prompt in (plain, more)]
    kinds = [attempt_to_wire(Attempt("g", 0, request, ()), 1) for request in requests]
    assert [submit.WhichOneof("prompt") for submit in kinds] == ["messages", "conversation"]


_CALL = inference.ToolCall(id="1", name="f")


@pytest.mark.parametrize(
    ("role", "parts", "field"),
    [
        (inference.ROLE_UNSPECIFIED, {}, "role"),
        (9, {}, "role"),
        (inference.ROLE_TOOL, {"tool_call_id": "x" * 16_385}, "tool_call_id"),
        (inference.ROLE_USER, {"tool_call_id": "x"}, "tool_call_id"),
        (inference.ROLE_USER, {"reasoning": "x"}, "reasoning"),
        (inference.ROLE_USER, {"tool_calls": [_CALL]}, "tool_calls"),
        (
            inference.ROLE_ASSISTANT,
            {"tool_calls": [_CALL, inference.ToolCall(name="f" * 16_385)]},
            "tool_calls[1].function.name",
        ),
        (inference.ROLE_ASSISTANT, {"tool_calls": [inference.ToolCall(id="1" * 16_385)]}, "tool_calls[0].id"),
        (inference.ROLE_ASSISTANT, {"tool_calls": [_CALL] * 129}, "tool_calls"),
    ],
)
def test_a_message_that_cannot_be_is_refused_by_name(role: inference.Role.ValueType, parts: dict[str, Any], field: str) -> None:
    message = inference.Message(role=role, content="x", **parts)
    with pytest.raises(RyzansteinError) as failure:
        chat_from_wire(inference.ChatRequest(messages=[message]))
    assert failure.value.violations[0].field == f"messages[0].{field}"


def test_what_came_with_the_doors_goes_over_the_wire_and_back() -> None:
    params = SamplingParams(
        seed=1,
        bad_words=("no", "never"),
        allowed_token_ids=(3, 1),
        skip_special_tokens=False,
        include_stop_str_in_output=True,
        prompt_logprobs=0,
        truncate_prompt_tokens=9,
    )
    assert sampling_from_wire(sampling_to_wire(params)) == params
    for template in (
        TemplateOptions(),
        TemplateOptions('{"a":1}'),
        TemplateOptions(add_generation_prompt=False),
        TemplateOptions("", False, True),
    ):
        request = GenerationRequest("m", ChatPrompt((Message(Role.USER, "a"),), template=template), SamplingParams(seed=1))
        attempt = Attempt("g", 0, request, (ChoiceProgress(),))
        assert attempt_from_wire(attempt_to_wire(attempt, 1)).request.prompt == request.prompt
    started = Started("g", "m", "n", 5, 1_700_000_000, "chat,usage")
    scores = PromptScores(3, [PromptToken(1, "a", None), PromptToken(2, "b", -0.5, (TopLogprob(7, "c", -0.25),))])
    assert event_from_wire(event_to_wire(started)) == started
    assert event_from_wire(event_to_wire(scores)) == scores
