"""Overload on an engine whose steps take simulated time: who is refused, when, and what the others get."""

from __future__ import annotations

import random

import pytest

from ryzanstein.errors import DEADLINE_UNREACHABLE, Code
from ryzanstein.worker.engine.plan import StepPlan

SIZES = {"num_blocks": 512, "block_size": 4, "max_sequences": 8, "token_budget": 64, "max_waiting": 512}
STEP_S, TOKEN_S = 0.01, 0.0002
ANSWER = 20


def cost_s(plan: StepPlan) -> float:
    return STEP_S + TOKEN_S * len(plan.token_ids)


@pytest.fixture
def timed(run):
    def make(**settings):
        it = run(**{**SIZES, **settings})
        it.ranks.cost_s = cost_s
        return it

    return make


def warm_up(it, group, num: int = 16) -> None:
    """Until the engine knows its pace."""
    for number in range(num):
        it.engine.submit(group(10_000 + number, [number] * 8, max_tokens=ANSWER))
    it.drain()


class Arrivals:
    """Poisson arrivals at a multiple of the engine's capacity; when each came, had its first token, and what it had."""

    def __init__(self, it, group, load: float, seed: int = 1, **fields) -> None:
        self.it, self.group, self.fields = it, group, fields
        self.random = random.Random(seed)
        self.rate = load * SIZES["max_sequences"] / ANSWER / (STEP_S + 10 * TOKEN_S)
        self.came: dict[int, float] = {}
        self.first_s: dict[int, float] = {}
        self.tokens = 0

    def run(self, seconds: float) -> None:
        began = at = self.it.time
        while self.it.time < began + seconds:
            while at <= self.it.time:
                self.submit(at)
                at += self.random.expovariate(self.rate)
            if not self.it.engine.has_work:
                self.it.now += at - self.it.time
                continue
            events = self.it.step()
            self.tokens += len(events.groups)
            for number in events.groups:
                if number in self.came:
                    self.first_s.setdefault(number, self.it.time - self.came[number])

    def submit(self, at: float) -> None:
        number = len(self.came) + 1
        self.came[number] = at
        fields = {name: value(at) if callable(value) else value for name, value in self.fields.items()}
        self.it.engine.submit(self.group(number, [number % 97] * 8, max_tokens=ANSWER, **fields))


@pytest.mark.parametrize("load", [0.5, 1.0, 2.0, 3.0, 10.0])
@pytest.mark.long
def test_whoever_is_accepted_has_the_first_token_within_the_objective_at_any_load(timed, group, load) -> None:
    it = timed(ttft_objective_s=0.4)
    warm_up(it, group)
    arrivals = Arrivals(it, group, load)
    arrivals.run(30)
    assert max(arrivals.first_s.values()) <= 0.4 + 2 * STEP_S
    if load <= 0.5:
        assert not it.failed
    if load > 1:
        assert {failure.reason for failure in it.failed.values()} == {"QUEUE_FULL"}


@pytest.mark.long
def test_throughput_at_three_times_the_capacity_is_that_of_the_peak(timed, group) -> None:
    tokens = {}
    for load in (1.2, 3.0):
        it = timed(ttft_objective_s=0.4)
        warm_up(it, group)
        arrivals = Arrivals(it, group, load)
        arrivals.run(30)
        tokens[load] = arrivals.tokens
    assert tokens[3.0] >= 0.95 * tokens[1.2]


@pytest.mark.long
def test_without_an_objective_the_wait_grows_to_the_bound_of_the_line(timed, group) -> None:
    it = timed()
    warm_up(it, group)
    arrivals = Arrivals(it, group, 3.0)
    arrivals.run(30)
    assert max(arrivals.first_s.values()) > 5


def test_few_are_refused_after_they_were_accepted(timed, group) -> None:
    it = timed(ttft_objective_s=0.4)
    warm_up(it, group)
    arrivals = Arrivals(it, group, 3.0)
    refused_late = 0
    original = it.engine._groups.fail

    def fail(number, error):
        nonlocal refused_late
        refused_late += it.engine._groups._groups[number].accepted
        original(number, error)

    it.engine._groups.fail = fail
    arrivals.run(30)
    assert refused_late <= 0.05 * len(arrivals.first_s)


def test_the_refusal_says_when_to_come_back_and_then_there_is_room(timed, group) -> None:
    it = timed(ttft_objective_s=0.4)
    warm_up(it, group)
    for number in range(1, 60):
        it.engine.submit(group(number, [number] * 8, max_tokens=ANSWER))
    it.step()
    refused = max(it.failed.values(), key=lambda failure: failure.retry_after_s)
    assert (refused.code, refused.reason) == (Code.RESOURCE_EXHAUSTED, "QUEUE_FULL")
    assert float(refused.metadata["expected_wait_s"]) > 0.8 * float(refused.metadata["objective_s"])
    first = it.failed[min(it.failed)]
    until = it.time + first.retry_after_s
    while it.time < until:
        it.step()
    it.engine.submit(group(1000, [1] * 8, max_tokens=ANSWER))
    it.step()
    assert 1000 not in it.failed


def test_a_prompt_that_alone_takes_longer_than_the_objective_is_refused_for_a_wait_and_not_for_itself(timed, group) -> None:
    it = timed(ttft_objective_s=0.05)
    warm_up(it, group, SIZES["max_sequences"])
    it.engine.submit(group(1, list(range(500)), max_tokens=1))
    it.engine.submit(group(2, list(range(500, 1000)), max_tokens=1))
    it.drain()
    assert list(it.failed) == [2], "it would wait for the first"
    it.engine.submit(group(3, list(range(500, 1000)), max_tokens=1))
    it.drain()
    assert list(it.failed) == [2], "and is served when it need not wait"


def test_a_deadline_that_cannot_be_met_is_refused_before_any_work_and_not_when_it_has_passed(timed, group) -> None:
    it = timed()
    warm_up(it, group)
    for number in range(1, 41):
        it.engine.submit(group(number, [number] * 8, max_tokens=ANSWER))
    it.engine.submit(group(100, [1] * 8, max_tokens=ANSWER, deadline=it.time + 0.5))
    it.engine.submit(group(101, [1] * 8, max_tokens=ANSWER, deadline=it.time + 30))
    began = it.time
    it.step()
    assert it.time - began < 0.1
    failure = it.failed[100]
    assert (failure.code, failure.reason) == (Code.DEADLINE_EXCEEDED, DEADLINE_UNREACHABLE)
    assert failure.retry_after_s > 0
    assert float(failure.metadata["expected_s"]) == pytest.approx(1.2 + 0.24, rel=0.2)
    it.drain()
    assert (101, 0) in it.ended
    assert it.engine.stats().shed == {"deadline": 1}


def test_whoever_is_started_under_overload_makes_its_deadline(timed, group) -> None:
    it = timed()
    warm_up(it, group)
    arrivals = Arrivals(it, group, 3.0, deadline=lambda at: at + 0.6)
    arrivals.run(20)
    wasted = [number for number, failure in it.failed.items() if failure.reason == "DEADLINE_EXCEEDED"]
    assert len(wasted) < 0.05 * len(arrivals.first_s)
    peak = 20 * SIZES["max_sequences"] / ANSWER / (STEP_S + 8 * TOKEN_S)
    assert sum((number, 0) in it.ended for number in arrivals.came) > 0.9 * peak


def test_a_deadline_that_cuts_an_answer_off_is_no_reason_to_refuse_it_while_there_are_places(timed, group) -> None:
    it = timed()
    warm_up(it, group)
    it.engine.submit(group(1, [1] * 8, max_tokens=400, deadline=it.time + 0.3))
    it.drain()
    assert it.failed[1].reason == "DEADLINE_EXCEEDED"
    assert len(it.tokens[1, 0]) > 20


def test_nothing_is_refused_before_anything_was_measured(timed, group) -> None:
    it = timed(ttft_objective_s=0.001)
    for number in range(6):
        it.engine.submit(group(number, [number] * 8, max_tokens=2))
    it.step()
    assert not it.failed


def test_a_continuation_is_never_refused_for_being_late(timed, group) -> None:
    it = timed(ttft_objective_s=0.05)
    warm_up(it, group, 8)
    for number in range(1, 60):
        it.engine.submit(group(number, [number] * 8, max_tokens=ANSWER, generated=[[1, 2, 3]]))
    it.drain()
    assert not it.failed


def test_a_paused_sequence_is_never_refused_for_being_late(timed, group) -> None:
    it = timed(ttft_objective_s=0.1)
    warm_up(it, group)
    for number in range(8):
        it.engine.submit(group(number, [number] * 8, max_tokens=60))
    it.step()
    for number in range(100, 116):
        it.engine.submit(group(number, [number % 97] * 8, max_tokens=30, priority=1))
    it.drain()
    assert not {number for number in it.failed if number < 100}
    assert it.engine.stats().paused["priority"] > 0


def test_a_higher_priority_is_judged_by_its_own_line(timed, group) -> None:
    it = timed(ttft_objective_s=0.4)
    warm_up(it, group)
    for number in range(1, 60):
        it.engine.submit(group(number, [number] * 8, max_tokens=ANSWER))
    it.step()
    assert it.failed
    it.engine.submit(group(100, [1] * 8, max_tokens=2, priority=3))
    it.step()
    it.step()
    assert (100, 0) in it.ended


def test_a_light_tenant_is_judged_by_its_turn_and_not_by_the_length_of_the_line(timed, group) -> None:
    it = timed(ttft_objective_s=0.4)
    warm_up(it, group)
    for number in range(1, 60):
        it.engine.submit(group(number, [number] * 8, max_tokens=ANSWER, tenant="heavy"))
    it.step()
    assert len(it.failed) > 20
    it.engine.submit(group(100, [1] * 8, max_tokens=ANSWER, tenant="light"))
    it.drain()
    assert (100, 0) in it.ended


def test_prompts_are_cut_while_sequences_decode_so_that_their_tokens_are_in_time(timed, group) -> None:
    longest = {}
    for objective_s in (0.0, 0.018):
        it = timed(tpot_objective_s=objective_s)
        warm_up(it, group)
        for number in range(4):
            it.engine.submit(group(number, [number] * 8, max_tokens=400))
        it.step()
        took = []
        for number in range(4, 8):
            it.engine.submit(group(number, range(number, number + 90), max_tokens=2))
        while (7, 0) not in it.ended:
            began = it.time
            it.step()
            took.append(it.time - began)
        longest[objective_s] = max(took)
    assert longest[0.0] > 0.022
    assert longest[0.018] <= 0.0185


def test_what_was_accepted_by_another_node_is_not_refused(timed, group) -> None:
    it = timed(ttft_objective_s=0.05)
    warm_up(it, group, 8)
    for number in range(1, 40):
        it.engine.submit(group(number, [number] * 8, max_tokens=ANSWER, accepted_before=True))
    it.drain()
    assert not it.failed


def test_each_group_is_accepted_when_it_begins_or_is_refused(timed, group) -> None:
    it = timed(ttft_objective_s=0.4)
    warm_up(it, group)
    for number in range(1, 60):
        it.engine.submit(group(number, [number] * 8, max_tokens=ANSWER))
    accepted = []
    while it.engine.has_work:
        accepted += it.step().accepted
    assert sorted(accepted + list(it.failed)) == list(range(1, 60))
    assert len(it.failed) > 20


def test_who_waits_for_long_learns_that_it_may(timed, group) -> None:
    it = timed()
    warm_up(it, group)
    for number in range(60):
        it.engine.submit(group(number, [number] * 8, max_tokens=ANSWER))
    reported: dict[int, float] = {}
    began = it.time
    while it.engine.has_work:
        reported.update(dict.fromkeys(it.step().accepted, it.time - began))
    assert len(reported) == 60
    assert max(reported.values()) < 1.1
    assert it.time - began > 1.5, "the last of them waited for longer"
