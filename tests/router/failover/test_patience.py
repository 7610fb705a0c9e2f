"""When an attempt that brings nothing is forgotten, and when it waits its turn."""

from __future__ import annotations

import pytest

from ryzanstein.cluster import Load
from ryzanstein.generation.prompts import TextPrompt
from ryzanstein.generation.request import GenerationRequest, SamplingParams
from ryzanstein.generation.tokens import Token
from ryzanstein.process.awake import AwakeClock
from ryzanstein.router.failover.attempt import AttemptRun
from ryzanstein.router.failover.patience import AttemptPatience, Quiet
from ryzanstein.router.generations.generation import Generation
from ryzanstein.router.nodes.links.link import NodeLink
from ryzanstein.router.nodes.links.phi_detector import PhiThresholds
from ryzanstein.router.nodes.roster import AttemptPlacement
from ryzanstein.router.telemetry import RouterTelemetry

PATIENCE = AttemptPatience(accept_s=5.0, silence_s=20.0)
IDLE, QUEUE = Load(running=3, waiting=0, capacity=64), Load(running=64, waiting=128, capacity=64)


@pytest.mark.parametrize(
    ("quiet", "bound_s"),
    [
        (Quiet(100.0, None, IDLE), 5.0),
        (Quiet(100.0, None, QUEUE), 5.0),
        (Quiet(100.0, 10, IDLE), 20.5),
        (Quiet(100.0, 4000, IDLE), 220.0),
        (Quiet(100.0, 0, IDLE), 20.0),
        (Quiet(100.0, 10, QUEUE, overtaken=True), 60.5),
        (Quiet(100.0, 0, QUEUE, overtaken=True), 60.0),
        (Quiet(100.0, 4000, IDLE, overtaken=True, preempted=True), 220.0),
    ],
)
def test_it_is_forgotten_exactly_when_the_bound_has_passed(quiet: Quiet, bound_s: float) -> None:
    assert PATIENCE.left_s(quiet, 100.0) == pytest.approx(bound_s)
    assert PATIENCE.left_s(quiet, 100.0 + bound_s - 0.01) > 0
    assert PATIENCE.left_s(quiet, 100.0 + bound_s) <= 0


@pytest.mark.parametrize("uncomputed", [0, 10])
def test_in_a_queue_nobody_is_forgotten_before_someone_later_has_begun(uncomputed: int) -> None:
    assert PATIENCE.left_s(Quiet(100.0, uncomputed, QUEUE), 100_000.0) == PATIENCE.accept_s
    assert PATIENCE.left_s(Quiet(100.0, uncomputed, QUEUE, overtaken=True), 100_000.0) < 0


def test_a_preempted_attempt_waits_as_long_as_its_node_has_a_queue() -> None:
    assert PATIENCE.waits(Quiet(100.0, 10, QUEUE, overtaken=True, preempted=True))
    assert not PATIENCE.waits(Quiet(100.0, 10, IDLE, overtaken=True, preempted=True))
    assert not PATIENCE.waits(Quiet(100.0, 10, QUEUE, overtaken=True))


def test_a_node_of_unknown_capacity_has_a_bound_too() -> None:
    assert PATIENCE.bound_s(Quiet(0.0, 0, Load(), overtaken=True)) == 20.0


class Deaf:
    """Nothing happens to a link that never connects."""

    def link_up(self, link: NodeLink, restarted: bool) -> None: ...

    def link_down(self, link: NodeLink, cause: str) -> None: ...

    def link_changed(self, link: NodeLink) -> None: ...


async def test_only_an_attempt_of_the_same_tenant_and_priority_overtakes() -> None:
    link = NodeLink("127.0.0.1:9", "router-t", PhiThresholds(), Deaf(), AwakeClock())
    first = AttemptPlacement(link, "a", 1, "acme", 0)
    AttemptPlacement(link, "a", 2, "other", 0).began()
    AttemptPlacement(link, "a", 3, "acme", 1).began()
    assert not first.overtaken
    AttemptPlacement(link, "a", 4, "acme", 0).began()
    assert first.overtaken


async def test_the_tenants_that_a_link_remembers_are_bounded() -> None:
    link = NodeLink("127.0.0.1:9", "router-t", PhiThresholds(), Deaf(), AwakeClock())
    for handle in range(1, 10_000):
        AttemptPlacement(link, "a", handle, f"tenant {handle}", 0).began()
    assert len(link.newest_begun) <= 4096


def test_a_prompt_that_is_computed_again_counts_from_its_beginning() -> None:
    request = GenerationRequest("m", TextPrompt("a"), SamplingParams(max_tokens=9, seed=1))
    generation = Generation("g", request, RetainedStub())
    run = AttemptRun(generation, 0, "a", RouterTelemetry(), lambda event: None)
    generation.log.admit(0)
    run.accepted(4000)
    assert run.quiet.num_uncomputed == 4000
    run.progressed(3584)
    assert run.quiet.num_uncomputed == 416
    assert run.token(0, 0, Token(1, "a"))
    assert run.quiet.num_uncomputed == 0
    run.preempted(0)
    assert run.quiet.num_uncomputed == 4001
    run.progressed(1000)
    assert run.quiet.num_uncomputed == 3001


class RetainedStub:
    """Nobody reads the generation."""

    def generation_started(self, generation: Generation) -> None: ...

    def first_token(self, generation: Generation) -> None: ...

    def readers_changed(self, generation: Generation) -> None: ...

    def has_news(self, readers: object) -> None: ...
