"""The breaker's blame table and states. The replays are failures that users of other routers reported."""

from __future__ import annotations

import pytest

from ryzanstein.errors import Code
from ryzanstein.router.nodes.breaker import (
    FAULTS_IN_A_ROW,
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    PROBE_EXPIRES_S,
    Blame,
    Breaker,
    BreakerState,
    blame,
)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def breaker(clock: Clock) -> Breaker:
    return Breaker(clock, lambda state: None)


@pytest.mark.parametrize(
    ("code", "node_fault", "expected"),
    [
        (Code.INVALID_ARGUMENT, False, Blame.CLIENT),
        (Code.NOT_FOUND, False, Blame.CLIENT),
        (Code.FAILED_PRECONDITION, False, Blame.CLIENT),
        (Code.OUT_OF_RANGE, False, Blame.CLIENT),
        (Code.PERMISSION_DENIED, False, Blame.CLIENT),
        (Code.UNAUTHENTICATED, False, Blame.CLIENT),
        (Code.CANCELLED, False, Blame.CLIENT),
        (Code.DEADLINE_EXCEEDED, False, Blame.CLIENT),
        (Code.UNIMPLEMENTED, False, Blame.CLIENT),
        (Code.ALREADY_EXISTS, False, Blame.CLIENT),
        (Code.RESOURCE_EXHAUSTED, False, Blame.BACK_PRESSURE),
        (Code.UNAVAILABLE, False, Blame.BACK_PRESSURE),
        (Code.ABORTED, False, Blame.BACK_PRESSURE),
        (Code.INTERNAL, False, Blame.NODE),
        (Code.UNKNOWN, False, Blame.NODE),
        (Code.INTERNAL, True, Blame.NODE),
        (Code.UNAVAILABLE, True, Blame.NODE),
    ],
)
def test_blame(code: Code, node_fault: bool, expected: Blame) -> None:
    assert blame(code, node_fault) is expected


def test_every_code_has_a_blame() -> None:
    assert {blame(code, False) for code in Code} == set(Blame) - {Blame.REQUEST}


@pytest.mark.parametrize(
    ("code", "reason", "node_fault", "expected"),
    [
        (Code.INTERNAL, "LOGITS_NOT_FINITE", False, Blame.REQUEST),
        (Code.RESOURCE_EXHAUSTED, "OUT_OF_MEMORY", False, Blame.REQUEST),
        (Code.UNAVAILABLE, "RANKS_UNSOUND", True, Blame.NODE),
        (Code.INTERNAL, "LOGITS_NOT_FINITE", True, Blame.NODE),
    ],
)
def test_a_node_that_is_well_is_not_blamed_for_a_request_that_it_cannot_run(
    code: Code, reason: str, node_fault: bool, expected: Blame
) -> None:
    assert blame(code, node_fault, reason) is expected


@pytest.mark.parametrize(
    ("report", "code"),
    [
        ("sglang 25811: prompts longer than the context took the fleet down", Code.INVALID_ARGUMENT),
        ("sglang PR 39464: a full queue shed everything while the engine was idle", Code.RESOURCE_EXHAUSTED),
        ("sglang PR 39464: 503 of a draining worker", Code.UNAVAILABLE),
    ],
)
def test_a_storm_of_answers_that_are_not_the_nodes_fault_leaves_it_closed(breaker: Breaker, report: str, code: Code) -> None:
    for _ in range(1000):
        assert breaker.admits, report
        breaker.sent()
        assert blame(code, False) is not Blame.NODE
        breaker.worked()
    assert breaker.state is BreakerState.CLOSED


def test_nemo_rl_3613_a_dead_node_is_not_picked_again_for_each_request(breaker: Breaker) -> None:
    breaker.open()
    assert not breaker.admits


def test_dynamo_13088_a_stalled_node_opens_it_like_a_dead_one(breaker: Breaker) -> None:
    breaker.worked()
    breaker.open()
    assert breaker.state is BreakerState.OPEN


def test_sglang_31206_a_probe_that_nobody_reports_does_not_shut_the_node_for_ever(breaker: Breaker, clock: Clock) -> None:
    breaker.open()
    clock.now += FIRST_PAUSE_S
    assert breaker.admits
    breaker.sent()
    assert not breaker.admits
    clock.now += PROBE_EXPIRES_S
    assert breaker.state is BreakerState.HALF_OPEN
    assert breaker.admits


def test_a_probe_that_its_client_gave_up_lets_another_one_probe(breaker: Breaker, clock: Clock) -> None:
    breaker.open()
    clock.now += FIRST_PAUSE_S
    breaker.sent()
    breaker.withdrawn()
    assert breaker.state is BreakerState.HALF_OPEN
    assert breaker.admits


def test_a_probe_that_works_closes_it(breaker: Breaker, clock: Clock) -> None:
    breaker.open()
    clock.now += FIRST_PAUSE_S
    breaker.sent()
    breaker.worked()
    assert breaker.state is BreakerState.CLOSED
    assert breaker.admits


def test_a_probe_that_fails_opens_it_for_twice_as_long_up_to_a_bound(breaker: Breaker, clock: Clock) -> None:
    breaker.open()
    pause_s = FIRST_PAUSE_S
    for _ in range(10):
        clock.now += pause_s
        assert breaker.state is BreakerState.HALF_OPEN
        breaker.sent()
        breaker.fault()
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        clock.now += 0.99 * pause_s
        assert breaker.state is BreakerState.OPEN
        clock.now -= 0.99 * pause_s
    assert pause_s == LONGEST_PAUSE_S


def test_single_faults_between_successes_leave_it_closed_and_some_in_a_row_open_it(breaker: Breaker) -> None:
    for _ in range(10):
        breaker.fault()
        breaker.worked()
    assert breaker.state is BreakerState.CLOSED
    for _ in range(FAULTS_IN_A_ROW):
        breaker.fault()
    assert breaker.state is BreakerState.OPEN


def test_one_death_reported_by_many_requests_is_one_death(breaker: Breaker, clock: Clock) -> None:
    for _ in range(64):
        breaker.open()
    clock.now += FIRST_PAUSE_S
    assert breaker.admits


def test_a_late_success_of_a_request_from_before_does_not_close_an_open_breaker(breaker: Breaker) -> None:
    breaker.open()
    breaker.worked()
    assert breaker.state is BreakerState.OPEN


def test_another_process_on_the_node_starts_with_a_clean_slate(breaker: Breaker) -> None:
    breaker.open()
    breaker.reset()
    assert breaker.admits
    assert breaker.state is BreakerState.CLOSED


def test_changes_are_reported(clock: Clock) -> None:
    reported: list[BreakerState] = []
    breaker = Breaker(clock, reported.append)
    breaker.open()
    clock.now += FIRST_PAUSE_S
    breaker.sent()
    breaker.worked()
    assert reported == [BreakerState.OPEN, BreakerState.HALF_OPEN, BreakerState.CLOSED]
