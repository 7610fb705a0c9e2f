"""The line before an engine of others: the same decisions as those of our engine, where blocks are plenty."""

from __future__ import annotations

import asyncio
import time
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ryzanstein import errors
from ryzanstein.errors import Code
from ryzanstein.generation.tokens import FinishReason
from ryzanstein.worker.engine.messages import CancelGroup, FinishChoice
from ryzanstein.worker.engine.plan import SampledToken
from ryzanstein.worker.engines.front.front import Front, front_settings
from ryzanstein.worker.settings.rank_settings import QueueSettings


class Scripted:
    """A front on an engine that computes when it is told to, and all that the front said."""

    def __init__(self, places=2, context=4096, next_token=None, **queue):
        self.now = 1000.0
        self.next_token = next_token
        self.began, self.dropped, self.live = [], [], []
        self.tokens, self.ended, self.failed, self.order = {}, {}, {}, []
        self.accepted, self.prefilled = [], []
        self.on_events = lambda events: None
        queue = QueueSettings(**{"max_waiting": 1024, **queue})
        self.front = Front(front_settings(context, places, 512, queue), self, self._emit, lambda: self.now)

    def begin(self, sequence):
        assert sequence not in self.live
        self.began.append((sequence.group.id, sequence.choice))
        self.live.append(sequence)

    def drop(self, sequence):
        self.dropped.append((sequence.group.id, sequence.choice))
        self.live.remove(sequence)

    def _emit(self, events):
        seen = Counter(zip(events.groups, events.choices, strict=True))
        assert max(seen.values(), default=1) == 1, "two tokens of a choice in one step"
        for group, choice, token in zip(events.groups, events.choices, events.token_ids, strict=True):
            assert (group, choice) not in self.ended
            assert group not in self.failed
            if (group, choice) not in self.tokens:
                self.order.append((group, choice))
            self.tokens.setdefault((group, choice), []).append(token)
        self.ended |= {(end.group, end.choice): end for end in events.ended}
        self.failed |= {failed.group: failed for failed in events.failed}
        self.accepted += events.accepted
        self.prefilled += events.prefilled
        self.on_events(events)

    async def tick(self):
        for _ in range(3):
            await asyncio.sleep(0)

    async def round(self):
        """One token of each sequence, as a step of an engine."""
        for sequence in list(self.live):
            if sequence in self.live:
                tokens = sequence.tokens(0, sequence.num_tokens)
                self.front.token(sequence, SampledToken(self.next_token(tokens, sequence.choice, sequence.row.banned_ids)))
        await self.tick()

    async def drain(self):
        for _ in range(10_000):
            await self.tick()
            if not self.live:
                return
            await self.round()
        raise AssertionError("the front does not come to an end")


def words(tokens, choice, banned=()):
    value = (7 * choice + 31 * len(tokens) + sum(tokens)) % 97
    while value in banned:
        value += 1
    return value


async def test_tokens_that_arrive_together_are_told_one_by_one(group):
    it = Scripted()
    it.front.send(group(1, [5, 6], max_tokens=4))
    await it.tick()
    (sequence,) = it.live
    told = []
    it.on_events = lambda events: told.append(list(events.token_ids))
    for token in (11, 12, 13, 14, 15):
        it.front.token(sequence, SampledToken(token, -1.0, ((token, -1.0),)), num_cached=1)
    await it.tick()
    assert told == [[11], [12], [13], [14]], "one each, and nothing behind the last one that was asked for"
    assert it.ended[1, 0].reason == FinishReason.LENGTH
    assert it.ended[1, 0].cached_tokens == 1
    assert it.dropped == [(1, 0)]
    stats = it.front.stats()
    assert (stats.prefill_tokens, stats.decode_tokens, stats.prefix_queries, stats.prefix_hits) == (1, 3, 2, 1)
    assert (stats.running, stats.waiting) == (0, 0)


async def test_an_engine_gets_no_more_than_it_has_places_for(group):
    it = Scripted(places=3, next_token=words)
    for number in range(10):
        it.front.send(group(number, [number + 1] * 4, max_tokens=2 + number % 3))
    most = 0
    while len(it.ended) < 10:
        await it.tick()
        most = max(most, len(it.live))
        assert it.front.stats().running == len(it.live) == len(it.front)
        await it.round()
    assert most == 3
    assert it.began == [(number, 0) for number in range(10)]
    assert sorted(it.accepted) == list(range(10))


async def test_higher_priorities_go_first_and_tenants_take_turns(group):
    it = Scripted(places=1, next_token=words)
    it.front.send(group(0, [1] * 4, tenant="a"))
    await it.tick()
    for number in range(1, 5):
        it.front.send(group(number, [1] * 4, tenant="a"))
    it.front.send(group(5, [1] * 4, tenant="b"))
    it.front.send(group(6, [1] * 4, tenant="a", priority=1))
    await it.drain()
    order = [number for number, _ in it.began]
    assert order[:3] == [0, 6, 5]
    assert order[3:] == [1, 2, 3, 4]


async def test_what_does_not_fit_the_line_or_the_context_is_refused(group):
    it = Scripted(places=1, context=64, max_waiting=16)
    for number in range(18):
        it.front.send(group(number, [1], tenant="a"))
        await it.tick()
    assert it.failed[17].reason == "QUEUE_FULL"
    assert it.failed[17].code == Code.RESOURCE_EXHAUSTED
    it.front.send(group(40, [1] * 60, max_tokens=6))
    await it.tick()
    assert it.failed[40].reason == errors.CONTEXT_TOO_LONG
    assert len(it.failed) == 2


async def test_a_deadline_ends_a_group_that_waits_and_one_that_runs(group):
    it = Scripted(places=1)
    it.front.send(group(1, [1], max_tokens=50, deadline=it.now + 5))
    it.front.send(group(2, [1], max_tokens=50, deadline=it.now + 3))
    await it.tick()
    it.now += 4
    began = time.monotonic()
    while 2 not in it.failed:
        await asyncio.sleep(0.01)
        assert time.monotonic() - began < 2, "nobody looks at deadlines while the engine says nothing"
    assert 1 not in it.failed
    it.now += 2
    await asyncio.sleep(0.5)
    assert {it.failed[number].code for number in (1, 2)} == {Code.DEADLINE_EXCEEDED}
    assert it.dropped == [(1, 0)]


async def test_a_cancelled_group_leaves_its_place_without_a_word(group):
    it = Scripted(places=1, next_token=words)
    it.front.send(group(1, [1], max_tokens=50))
    it.front.send(group(2, [1], max_tokens=2))
    await it.tick()
    await it.round()
    (sequence,) = it.live
    it.front.send(CancelGroup(1))
    it.front.token(sequence, SampledToken(5))
    await it.drain()
    assert it.dropped[0] == (1, 0)
    assert len(it.tokens[1, 0]) == 1
    assert (1, 0) not in it.ended
    assert 1 not in it.failed
    assert len(it.tokens[2, 0]) == 2


async def test_choices_of_a_prompt_begin_when_it_has_been_computed_once(group):
    it = Scripted(places=8, next_token=words)
    it.front.send(group(1, [1, 2, 3], max_tokens=3, n=3, temperature=1.0, seed=4))
    await it.tick()
    assert it.began == [(1, 0)]
    await it.round()
    assert it.began == [(1, 0), (1, 1), (1, 2)]
    await it.drain()
    assert [len(it.tokens[1, choice]) for choice in range(3)] == [3, 3, 3]


async def test_an_agent_may_end_a_choice_while_it_hears_of_its_token(group):
    it = Scripted(places=1, next_token=words)
    it.front.send(group(1, [1], max_tokens=50))
    await it.tick()
    (sequence,) = it.live
    it.on_events = lambda events: it.front.send(FinishChoice(1, 0)) if events.token_ids and not it.ended else None
    for token in range(4):
        it.front.token(sequence, SampledToken(token))
    await it.drain()
    assert it.tokens[1, 0] == [0]
    assert it.ended[1, 0].reason == FinishReason.STOP
    assert it.dropped == [(1, 0)]


async def test_stop_tokens_count_from_min_tokens_on(group):
    it = Scripted()
    it.front.send(group(1, [1], max_tokens=9, stop_token_ids=[7], min_tokens=2))
    await it.tick()
    (sequence,) = it.live
    for token in (3, 4, 7, 8):
        it.front.token(sequence, SampledToken(token))
    await it.tick()
    assert it.tokens[1, 0] == [3, 4, 7]
    assert it.ended[1, 0].reason == FinishReason.STOP


async def test_an_engine_may_end_or_fail_a_choice_once(group):
    it = Scripted()
    it.front.send(group(1, [1], max_tokens=9))
    it.front.send(group(2, [1], max_tokens=9))
    await it.tick()
    one, two = it.live
    it.front.token(one, SampledToken(3))
    it.front.ended(one, FinishReason.STOP)
    it.front.ended(one, FinishReason.STOP)
    it.front.failed(two, errors.unavailable("ENGINE_UNREACHABLE", "gone"))
    it.front.failed(two, errors.unavailable("ENGINE_UNREACHABLE", "gone"))
    it.front.token(two, SampledToken(3))
    await it.tick()
    assert it.ended[1, 0].reason == FinishReason.STOP
    assert it.failed[2].reason == "ENGINE_UNREACHABLE"
    assert (2, 0) not in it.tokens
    assert it.front.stats().running == 0


async def test_a_continuation_goes_on_behind_its_tokens(group):
    it = Scripted(next_token=words)
    whole = group(1, [4, 5], max_tokens=6)
    it.front.send(whole)
    await it.drain()
    again = Scripted(next_token=words)
    again.front.send(group(1, [4, 5], max_tokens=6, generated=[it.tokens[1, 0][:2]], accepted_before=True))
    await again.drain()
    assert again.tokens[1, 0] == it.tokens[1, 0][2:]


async def test_nothing_is_said_after_the_end(group):
    it = Scripted()
    it.front.send(group(1, [1], max_tokens=9))
    await it.tick()
    (sequence,) = it.live
    it.front.token(sequence, SampledToken(3))
    it.front.close()
    it.front.token(sequence, SampledToken(3))
    await it.tick()
    assert it.tokens == {}


async def test_a_prompt_that_computes_is_told_until_its_first_token(group):
    it = Scripted()
    it.front.send(group(1, [1] * 9, max_tokens=9))
    await it.tick()
    (sequence,) = it.live
    assert it.front.prefilling == [sequence]
    it.front.computing(sequence, 4)
    await it.tick()
    it.front.token(sequence, SampledToken(3))
    it.front.computing(sequence, 4)
    await it.tick()
    assert it.prefilled == [(1, 4)]
    assert it.front.prefilling == []


@pytest.mark.long
@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.sampled_from("abc"), st.integers(1, 12), st.integers(1, 9), st.integers(1, 3)),
        min_size=1,
        max_size=24,
    ),
    st.integers(1, 4),
)
def test_sequences_begin_in_the_order_of_our_engine(run, group, asked, places):
    """Each prompt is of its own, so nothing is cached, and fits a step: then places are all that there is to wait for."""
    messages = [
        group(number, [number + 1] * length, max_tokens=answer, tenant=tenant, priority=priority, n=n, temperature=1.0, seed=1)
        for number, (priority, tenant, length, answer, n) in enumerate(asked)
    ]
    ours = run(num_blocks=4096, block_size=16, max_sequences=places, token_budget=2048)
    for message in messages:
        ours.engine.submit(message)
    order = []
    while ours.engine.has_work:
        events = ours.step()
        order += [key for key in zip(events.groups, events.choices, strict=True) if key not in order]

    async def theirs():
        it = Scripted(places=places, next_token=words)
        for message in messages:
            it.front.send(message)
        await it.drain()
        return it

    it = asyncio.run(theirs())
    assert not ours.failed
    assert not it.failed
    assert Counter(it.order) == Counter(order)
    if all(message.sampling.n == 1 for message in messages):  # our engine also lets choices that come later displace others
        assert it.order == order
    assert [len(it.tokens[key]) for key in order] == [len(ours.tokens[key]) for key in order]
