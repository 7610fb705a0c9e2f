"""What is written in any pieces, at any moments, with any writes lost or repeated, is read as what there was."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ryzanstein import clock
from ryzanstein.errors import Code, RyzansteinError, no_nodes
from ryzanstein.generation.prompts import ChatPrompt, Message, Role, TemplateOptions, TextPrompt, TokenPrompt, ToolCall
from ryzanstein.generation.request import CACHE_SCOPES, AdapterRef, GenerationRequest, RequestKey, SamplingParams
from ryzanstein.generation.tokens import FinishReason, NodeMove, Token, TokenLogprobs, TopLogprob
from ryzanstein.generation.tools import Tool, ToolMode, Tools
from ryzanstein.router.generations.generation import Generation
from ryzanstein.router.generations.token_log import AppendResult
from ryzanstein.router.journal.encoding import (
    BatchWriter,
    check_readable,
    decode_request,
    encode_request,
    has_settled,
    restore,
    with_own_deadline,
)
from ryzanstein.router.journal.journal import JournalRecord
from ryzanstein.v1 import journal_pb2 as journal_pb

CHOICES = 3
REQUEST = GenerationRequest("m", TextPrompt("hello"), SamplingParams(seed=7, n=CHOICES))


class Unobserved:
    def generation_started(self, generation: Generation) -> None: ...

    def first_token(self, generation: Generation) -> None: ...

    def readers_changed(self, generation: Generation) -> None: ...

    def has_news(self, readers: Collection[Any]) -> None: ...


def empty(epoch: int = 0) -> Generation:
    return Generation("g", REQUEST, Unobserved(), epoch)


def token(choice: int, index: int) -> Token:
    logprobs = TokenLogprobs(-0.5, (TopLogprob(index, "t", -0.5, b"t\xf0"),), "t", b"t\xf0") if choice == 1 else None
    return Token(1000 * choice + index, "" if index % 3 else f"é{index}", logprobs)


class Node:
    """Writes into a generation what nodes do: the next token of a choice, or its end."""

    def __init__(self, generation: Generation, attempt: int, lengths: list[int]) -> None:
        self.generation, self.attempt, self.lengths = generation, attempt, lengths
        generation.log.admit(attempt)

    def step(self, choice: int) -> None:
        log = self.generation.log
        index = len(log.choices[choice].tokens)
        if index < self.lengths[choice]:
            node_id = f"node-{index // 4}"
            assert log.append(self.attempt, choice, index, token(choice, index), node_id) is AppendResult.NEW
        elif log.choices[choice].reason is None:
            assert log.finish(self.attempt, choice, FinishReason.LENGTH) is AppendResult.NEW
            self.generation.end_choice(choice, cached_prompt_tokens=choice)

    def run(self) -> None:
        for choice, length in enumerate(self.lengths):
            for _ in range(length + 1):
                self.step(choice)


def assert_same(one: Generation, other: Generation) -> None:
    assert one.started == other.started
    assert one.ended == other.ended
    for mine, theirs in zip(one.log.choices, other.log.choices, strict=True):
        assert mine.tokens == theirs.tokens
        assert mine.nodes == theirs.nodes
        assert mine.reason == theirs.reason


@given(data=st.data())
@settings(max_examples=300, deadline=None)
def test_nothing_is_lost_or_repeated_over_any_cuts_and_lost_writes(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(0, 12), min_size=CHOICES, max_size=CHOICES))
    undisturbed = empty()
    undisturbed.start("node-0", 7)
    Node(undisturbed, 0, lengths).run()

    generation, batches = empty(), []
    for epoch in range(data.draw(st.integers(1, 4))):
        if epoch:
            generation = empty(epoch)
            assert not restore(generation, tuple(batches))
        generation.start("node-0", 7)
        writer = BatchWriter(generation, known=bool(epoch))
        node = Node(generation, epoch << 16, lengths)
        for fate in data.draw(st.lists(st.sampled_from(["token", "token", "token", "written", "unanswered"]), max_size=40)):
            if fate == "token":
                node.step(data.draw(st.integers(0, CHOICES - 1)))
            else:
                # Unanswered: it may be in the journal, and is written again.
                batches.append(writer.next_batch())
                if fate == "written":
                    writer.written()
    survivor = empty(9)
    restore(survivor, tuple(batches))
    survivor.start("node-0", 7)
    Node(survivor, 9 << 16, lengths).run()
    assert [choice.tokens for choice in survivor.log.choices] == [choice.tokens for choice in undisturbed.log.choices]
    assert survivor.log.complete
    assert survivor.ended[-1].usage.completion_tokens == sum(lengths)


def test_a_settled_generation_comes_back_whole() -> None:
    generation = empty()
    generation.start("node-0", 7)
    Node(generation, 0, [5, 0, 9]).run()
    generation.settle()
    batch = BatchWriter(generation).next_batch()
    restored = empty(1)
    assert has_settled([batch])
    assert restore(restored, (batch,))
    assert restored.settled
    assert_same(restored, generation)


def test_how_an_answer_came_to_a_node_comes_back() -> None:
    generation = empty()
    generation.start("a", 3)
    for attempt, node_id, indices in ((0, "a", range(2)), (1, "b", range(2, 5))):
        generation.log.admit(attempt)
        for index in indices:
            assert generation.log.append(attempt, 0, index, token(0, index), node_id) is AppendResult.NEW
        generation.log.fence(attempt)
    moves = {2: NodeMove("a", "silence", 0.25, 1)}
    generation.log.choices[0].moves |= moves
    restored = empty(1)
    restore(restored, (BatchWriter(generation).next_batch(),))
    assert restored.log.choices[0].moves == moves
    assert restored.log.choices[0].nodes == [(0, "a"), (2, "b")]


def test_an_error_comes_back_with_all_that_it_says() -> None:
    generation = empty()
    error = RyzansteinError("full", Code.RESOURCE_EXHAUSTED, "QUEUE_FULL", {"waiting": "9"}, retry_after_s=1.5)
    generation.settle(error)
    restored = empty(1)
    assert restore(restored, (BatchWriter(generation).next_batch(),))
    assert restored.error is not None
    assert vars(restored.error) == vars(error)


def test_what_comes_after_an_end_says_that_it_was_resumed() -> None:
    generation = empty()
    generation.start("node-0", 7)
    node = Node(generation, 0, [5, 0, 9])
    node.step(0)
    writer = BatchWriter(generation)
    generation.settle(no_nodes("m", "none"))
    batches = [writer.next_batch()]
    writer.written()
    ended = empty(1)
    assert restore(ended, tuple(batches))
    assert ended.error is not None
    assert ended.error.reason == "NO_NODES"
    generation.resume()
    node.run()
    batches.append(writer.next_batch())
    resumed = empty(1)
    assert not has_settled(batches)
    assert not restore(resumed, tuple(batches))
    assert resumed.error is None
    assert not resumed.settled
    assert_same(resumed, generation)


def test_an_end_whose_tokens_are_missing_is_not_believed() -> None:
    generation = empty()
    generation.start("node-0", 7)
    writer = BatchWriter(generation)
    node = Node(generation, 0, [4, 4, 4])
    for _ in range(3):
        node.step(0)
    lost = writer.next_batch()
    writer.written()
    node.run()
    generation.settle()
    rest = writer.next_batch()
    assert lost != rest
    restored = empty(1)
    assert not restore(restored, (rest,))
    assert [len(choice.tokens) for choice in restored.log.choices] == [0, 4, 4]
    assert [choice.reason for choice in restored.log.choices] == [None, FinishReason.LENGTH, FinishReason.LENGTH]


def test_a_request_comes_back_as_it_was() -> None:
    prompts = (
        ChatPrompt((Message(Role.SYSTEM, "be"), Message(Role.USER, "ü"), Message(Role.ASSISTANT, ""))),
        ChatPrompt((Message(Role.USER, "ü"),), template=TemplateOptions('{"a":1}', False, True)),
        ChatPrompt(
            (Message(Role.ASSISTANT, "", (ToolCall("1", "f", "{"),)), Message(Role.TOOL, "x", tool_call_id="1")),
            tools=Tools((Tool("f", "d", "{}", True), Tool("g")), ToolMode.NAMED, "g", parallel=False),
        ),
        TextPrompt("continue\n"),
        TokenPrompt((1, 2, 3)),
    )
    sampling = SamplingParams(
        temperature=0.5, top_k=7, seed=2**63 - 1, max_tokens=9, min_tokens=2, stop=("a", "b"), logit_bias=((3, -1.5),), n=2
    )
    for prompt in prompts:
        request = GenerationRequest(
            "m",
            prompt,
            sampling,
            "session",
            "user",
            clock.unix_s() + 60.0,
            3,
            request_id="r",
            traceparent="00-t",
            tenant="t",
            last_node="a",
        )
        request = replace(request, key=RequestKey("k", b"\0body"), detached=True, created=5, answer_form="chat", kept=True)
        request = replace(request, tenant_named=True, never_cut=True, key_id="id", cache_scope="t")
        request = replace(request, adapter=AdapterRef("a", b"\1" * 32))
        assert all(getattr(request, name) for name in GenerationRequest.__dataclass_fields__), "a field is not tried"
        generation = Generation("g", request, Unobserved())
        read, new_messages = decode_request(encode_request(generation, 2))
        assert read.deadline == pytest.approx(request.deadline, abs=1.0)
        assert (replace(read, deadline=request.deadline), new_messages) == (request, 2)


@pytest.mark.parametrize("ahead_s", [-3600.0, 0.0, 3600.0])
def test_a_deadline_is_kept_at_a_router_whose_clock_differs(monkeypatch: pytest.MonkeyPatch, ahead_s: float) -> None:
    request = GenerationRequest("m", TextPrompt("hello"), SamplingParams(), deadline=clock.unix_s() + 20.0)
    generation = Generation("g", request, Unobserved())
    record = JournalRecord(1, encode_request(generation, 0), (BatchWriter(generation).next_batch(),), age_s=5.0)
    monkeypatch.setattr(clock, "_BEGAN_S", clock._BEGAN_S + ahead_s)
    taken, _ = decode_request(record.request)
    for each in (record, replace(record, batches=())):
        assert with_own_deadline(taken, each).deadline == pytest.approx(clock.unix_s() + 15.0, abs=1.0)
    assert not journal_pb.JournalRequest.FromString(record.request).submit.HasField("deadline")


def test_an_earlier_router_says_its_deadline_in_unix_time() -> None:
    request = GenerationRequest("m", TextPrompt("hello"), SamplingParams(), deadline=clock.unix_s() + 20.0)
    wire = journal_pb.JournalRequest.FromString(encode_request(Generation("g", request, Unobserved()), 0))
    wire.submit.ClearField("time_left")
    wire.submit.deadline.FromNanoseconds(1_700_000_000 * 10**9)
    record = JournalRecord(1, wire.SerializeToString(), (), age_s=5.0)
    assert with_own_deadline(decode_request(record.request)[0], record).deadline == 1_700_000_000


@pytest.mark.parametrize("part", ["request", "batch"])
def test_a_record_with_a_damaged_part_is_a_generation_that_is_lost(part: str) -> None:
    generation = Generation("g", REQUEST, Unobserved())
    record = JournalRecord(1, encode_request(generation, 0), (BatchWriter(generation).next_batch(),))
    check_readable("g", record)
    damaged = replace(record, request=b"\xff" * 9) if part == "request" else replace(record, batches=(b"\xff" * 9,))
    with pytest.raises(RyzansteinError) as lost:
        check_readable("g", damaged)
    assert lost.value.reason == "GENERATION_NOT_FOUND"


def test_a_request_of_a_later_version_is_not_read_in_part() -> None:
    data = journal_pb.JournalRequest.FromString(encode_request(empty(), 0))
    assert decode_request(data.SerializeToString())[0].prompt == REQUEST.prompt
    scoped = journal_pb.JournalRequest.FromString(
        encode_request(Generation("g", replace(REQUEST, cache_scope="t"), Unobserved()), 0)
    )
    assert list(scoped.features) == [CACHE_SCOPES], "a router that would drop the scope does not take it over"
    data.features.append("video")
    with pytest.raises(RyzansteinError) as refused:
        decode_request(data.SerializeToString())
    assert (refused.value.code, refused.value.reason) == (Code.UNIMPLEMENTED, "ROUTER_TOO_OLD")
    assert "video" in refused.value.message
