"""What is measured of a generation: the first token when it comes, the waits while they last, the rest at its end."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

import pytest
import structlog

from ryzanstein import errors
from ryzanstein.generation.prompts import TextPrompt
from ryzanstein.generation.request import GenerationRequest, SamplingParams
from ryzanstein.generation.tokens import Token
from ryzanstein.router.generations import generation as module
from ryzanstein.router.generations.generation import Generation, GenerationTimes
from ryzanstein.router.generations.measures import GenerationMeasures
from ryzanstein.router.telemetry import MOST_TENANTS, RouterTelemetry

REQUEST = GenerationRequest("m", TextPrompt("x"), SamplingParams(max_tokens=9), request_id="r")


class Measured:
    """A router's generations with the time that a test sets, as an observer of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        self.telemetry = RouterTelemetry()
        self.measures = GenerationMeasures(self.telemetry)
        self.running: list[Generation] = []
        self.measures.watch(self.running)
        monkeypatch.setattr(module.time, "monotonic", lambda: self.now)

    def generation_started(self, generation: Generation) -> None: ...

    def first_token(self, generation: Generation) -> None:
        self.measures.first_token(generation)

    def readers_changed(self, generation: Generation) -> None: ...

    def has_news(self, readers: Collection[asyncio.Event]) -> None: ...

    def begun(self, epoch: int = 0) -> Generation:
        """A generation that was admitted in 1 s, whose session took 2 s, its choice 3 s, and its acceptance 4 s."""
        times = GenerationTimes()
        self.now += 1
        times.admitted_at = self.now
        self.now += 2
        generation = Generation("g", REQUEST, self, epoch, times)
        self.running.append(generation)
        self.now += 3
        times.sent_at = self.now
        self.now += 4
        generation.start("node-0", 5)
        generation.log.admit(0)
        return generation

    def token(self, generation: Generation, index: int, after_s: float) -> None:
        self.now += after_s
        generation.log.append(0, 0, index, Token(7, "a"), "node-0")
        generation.token_added()

    def value(self, name: str, **labels: str) -> float | None:
        return self.telemetry.registry.get_sample_value(f"ryzanstein_router_{name}", labels)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Measured:
    return Measured(monkeypatch)


def test_the_first_token_is_observed_when_it_comes_and_stays_when_the_answer_fails(measured: Measured) -> None:
    generation = measured.begun()
    assert measured.value("time_to_first_token_seconds_count", model="m") is None
    measured.token(generation, 0, after_s=5)
    assert measured.value("time_to_first_token_seconds_count", model="m") == 1
    assert measured.value("time_to_first_token_seconds_sum", model="m") == 12
    measured.measures.ended(generation, "unavailable")
    assert measured.value("time_to_first_token_seconds_count", model="m") == 1


def test_the_stages_add_up_to_what_the_client_waited(measured: Measured) -> None:
    measured.token(measured.begun(), 0, after_s=5)
    stages = {"admission": 1.0, "session": 2.0, "choose": 3.0, "accept": 4.0, "first_token": 5.0}
    assert {stage: measured.value("stage_seconds_sum", stage=stage) for stage in stages} == stages


def test_the_end_says_what_the_time_was_spent_on(measured: Measured) -> None:
    generation = measured.begun()
    generation.num_attempts = 2
    for index, after_s in enumerate((5.0, 0.5, 7.0, 0.5)):
        measured.token(generation, index, after_s)
    with structlog.testing.capture_logs() as lines:
        measured.measures.ended(generation, "complete")
    (line,) = lines
    assert line["event"] == "generation ended"
    assert {name: line[name] for name in ("outcome", "tokens", "attempts", "request_id", "generation_id")} == {
        "outcome": "complete",
        "tokens": 4,
        "attempts": 2,
        "request_id": "r",
        "generation_id": "g",
    }
    seconds = {name: value for name, value in line.items() if name.endswith("_s")}
    assert seconds == {
        "duration_s": 20.0,
        "admission_s": 1.0,
        "session_s": 2.0,
        "choose_s": 3.0,
        "accept_s": 4.0,
        "first_token_s": 5.0,
        "longest_pause_s": 7.0,
    }
    assert measured.value("longest_pause_seconds_sum", model="m") == 7
    assert measured.value("time_per_output_token_seconds_sum", model="m") == pytest.approx(8 / 3)


def test_a_wait_shows_while_it_lasts(measured: Measured) -> None:
    generation = measured.begun()
    measured.now += 50
    assert measured.value("oldest_running_seconds") == measured.value("oldest_unanswered_seconds") == 57
    assert measured.value("silent_seconds") == 0
    measured.token(generation, 0, after_s=0)
    measured.now += 60
    assert (measured.value("silent_seconds"), measured.value("oldest_unanswered_seconds")) == (60, 0)
    measured.running.clear()
    assert (measured.value("silent_seconds"), measured.value("oldest_running_seconds")) == (0, 0)


def test_the_time_that_a_generation_did_not_run_is_no_pause(measured: Measured) -> None:
    generation = measured.begun()
    measured.token(generation, 0, after_s=1)
    generation.settle(errors.unavailable("NO_NODES", "none"))
    measured.now += 500
    generation.resume()
    measured.token(generation, 1, after_s=2)
    assert generation.times.longest_pause_s == 2


def test_the_waits_of_another_routers_generation_are_not_observed_again(measured: Measured) -> None:
    generation = measured.begun(epoch=1)
    measured.token(generation, 0, after_s=1)
    with structlog.testing.capture_logs() as (lines):
        measured.measures.ended(generation, "complete")
    assert measured.value("time_to_first_token_seconds_count", model="m") is None
    assert "accept_s" not in lines[0]
    assert measured.value("generations_total", model="m", outcome="complete") == 1


def test_the_first_failure_of_a_model_is_an_increase(measured: Measured) -> None:
    generation = measured.begun()
    measured.measures.began(generation)
    failures = ("internal", "unavailable", "deadline_exceeded", "unknown", "data_loss", "resource_exhausted")
    assert [measured.value("generations_total", model="m", outcome=each) for each in failures] == [0.0] * len(failures)
    measured.measures.ended(generation, "unavailable")
    measured.measures.began(generation)
    assert measured.value("generations_total", model="m", outcome="unavailable") == 1


def test_so_many_tenants_have_series_of_their_own() -> None:
    telemetry = RouterTelemetry()
    for number in range(2 * MOST_TENANTS):
        telemetry.tenants.ended(f"tenant-{number}", "complete")
    telemetry.tenants.ended("tenant-0", "refused")

    def value(tenant: str, outcome: str) -> float | None:
        labels = {"tenant": tenant, "outcome": outcome}
        return telemetry.registry.get_sample_value("ryzanstein_router_tenant_requests_total", labels)

    assert (value("tenant-0", "complete"), value("tenant-0", "refused")) == (1, 1)
    assert (value("other", "complete"), value(f"tenant-{MOST_TENANTS}", "complete")) == (MOST_TENANTS, None)
