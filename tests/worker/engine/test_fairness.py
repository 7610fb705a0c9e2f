"""Tenants that share an engine: what each is served while all of them want more."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ryzanstein.worker.engine.sequence import DECODE_WEIGHT, PREFILL_WEIGHT

pytestmark = pytest.mark.long

SIZES = {"num_blocks": 256, "block_size": 4, "max_sequences": 8, "token_budget": 64, "max_waiting": 256}


def jain(shares: Sequence[float]) -> float:
    """Jain, Chiu and Hawe (1984): 1 when all are equal, 1/n when one has everything."""
    return sum(shares) ** 2 / (len(shares) * sum(share * share for share in shares))


class Tenants:
    """Keeps so many requests of each tenant in an engine; counts what each was served, weighted."""

    def __init__(self, it, group, demand: dict[str, int], shape: dict[str, tuple[int, int]] | None = None) -> None:
        self.it, self.group, self.demand, self.shape = it, group, demand, shape or {}
        self.numbers = count(1)
        self.owner: dict[int, str] = {}
        self.open: Counter[str] = Counter()
        self.served: Counter[str] = Counter()

    def submit(self, tenant: str) -> None:
        number = next(self.numbers)
        prompt, answer = self.shape.get(tenant, (6, 12))
        self.owner[number] = tenant
        self.open[tenant] += 1
        self.it.engine.submit(self.group(number, [number] * prompt, max_tokens=answer, tenant=tenant))
        self.served[tenant] += PREFILL_WEIGHT * prompt

    def run(self, num_steps: int) -> Counter[str]:
        """Weighted tokens of each tenant in so many steps; a prompt counts when it is submitted, then corrected."""
        self.served.clear()
        for _ in range(num_steps):
            for tenant, num in self.demand.items():
                while self.open[tenant] < num:
                    self.submit(tenant)
            events = self.it.step()
            for number in events.groups:
                self.served[self.owner[number]] += DECODE_WEIGHT
            for end in events.ended:
                self.open[self.owner[end.group]] -= 1
            for failure in events.failed:
                self.open[self.owner[failure.group]] -= 1
        return self.served


def test_equal_tenants_get_equal_shares_though_one_sends_ten_times_as_much(run, group) -> None:
    demand = {"heavy": 80, "b": 8, "c": 8, "d": 8}
    shares = Tenants(run(**SIZES), group, demand).run(1200)
    assert jain([shares[tenant] for tenant in demand]) >= 0.99


def test_without_fairness_who_sends_ten_times_as_much_gets_it(run, group) -> None:
    demand = {"heavy": 80, "b": 8, "c": 8, "d": 8}
    shares = Tenants(run(**SIZES, fair=False), group, demand).run(1200)
    assert jain([shares[tenant] for tenant in demand]) < 0.5


def test_shares_are_of_tokens_and_not_of_requests(run, group) -> None:
    demand = {"long prompts": 16, "long answers": 16, "short": 16}
    shape = {"long prompts": (40, 4), "long answers": (4, 40), "short": (4, 4)}
    shares = Tenants(run(**SIZES), group, demand, shape).run(1500)
    assert jain([shares[tenant] for tenant in demand]) >= 0.95


def test_a_tenant_alone_gets_the_whole_engine(run, group) -> None:
    fair, unfair = run(**SIZES), run(**SIZES, fair=False)
    served = [Tenants(it, group, {"only": 40}).run(300)["only"] for it in (fair, unfair)]
    assert served[0] == served[1]
    assert all(len(plan.num_new) == 8 for plan in fair.ranks.plans[20:])


def test_what_one_tenant_does_not_want_the_others_get(run, group) -> None:
    it = run(**SIZES)
    shares = Tenants(it, group, {"modest": 1, "greedy": 40}).run(600)
    assert shares["greedy"] > 5 * shares["modest"]
    assert all(len(plan.num_new) == 8 for plan in it.ranks.plans[20:])


def test_who_stayed_away_does_not_come_back_with_savings(run, group) -> None:
    it = run(**SIZES)
    tenants = Tenants(it, group, {"present": 40})
    tenants.run(500)
    tenants.demand["absent"] = 40
    shares = tenants.run(500)
    assert jain([shares["present"], shares["absent"]]) >= 0.98


def test_a_light_tenants_request_does_not_wait_behind_the_heavy_ones_line(run, group) -> None:
    it = run(**SIZES)
    for number in range(200):
        it.engine.submit(group(number, [number] * 6, max_tokens=12, tenant="heavy"))
    for _ in range(30):
        it.step()
    it.engine.submit(group(1000, [7] * 6, max_tokens=12, tenant="light"))
    for _ in range(13):
        it.step()
    assert (1000, 0) in it.tokens, "it starts with the next place that becomes free"


@pytest.mark.parametrize(("fair", "place"), [(True, 4), (False, 6)])
def test_memory_pressure_pauses_the_tenant_that_had_most(run, group, answer, fair, place) -> None:
    it = run(num_blocks=24, block_size=4, max_sequences=8, token_budget=64, fair=fair)
    messages = [group(number, [number] * 4, max_tokens=40, tenant="heavy") for number in range(6)]
    for message in messages:
        it.engine.submit(message)
    for _ in range(12):
        it.step()
    light = group(100, [9] * 4, max_tokens=40, tenant="light")
    it.engine.submit(light)
    it.drain()
    assert it.engine.stats().paused["memory"] > 0
    assert {key: tokens for key, tokens in it.tokens.items() if key in it.ended} == {
        (message.group, 0): answer(message, 0)[0] for message in [*messages, light]
    }
    assert list(it.ended).index((100, 0)) == place, "without fairness behind all that the heavy tenant had begun"


def test_who_is_cancelled_in_its_prompt_gets_back_what_was_not_computed(run, group) -> None:
    it = run(num_blocks=256, block_size=4, max_sequences=8, token_budget=16)
    it.engine.submit(group(1, range(96), tenant="a"))
    it.engine.submit(group(2, [1, 2], tenant="b", max_tokens=99))
    it.step()
    account = next(s.group.account for s in it.engine._scheduler.running if s.group.id == 1)
    assert account.counter == 96
    it.engine.cancel(1)
    assert account.counter == 16 * PREFILL_WEIGHT


@settings(max_examples=40, deadline=None)
@given(
    demand=st.lists(st.integers(1, 12), min_size=2, max_size=5),
    shapes=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 20)), min_size=5, max_size=5),
    sizes=st.fixed_dictionaries({"num_blocks": st.integers(20, 60), "max_sequences": st.integers(1, 8)}),
)
def test_no_tenant_starves_and_every_request_comes_to_its_end(run, group, demand, shapes, sizes) -> None:
    it = run(**sizes, block_size=4, token_budget=32, max_waiting=256)
    names = [f"t{i}" for i in range(len(demand))]
    tenants = Tenants(it, group, dict(zip(names, demand, strict=True)), dict(zip(names, shapes, strict=False)))
    served = tenants.run(600)
    assert min(served[name] for name in names) > 0
    ended = Counter(tenants.owner[number] for number, _ in it.ended)
    assert all(ended[name] > 0 for name in names), "each tenant has had an answer"
    it.drain()
    assert it.engine.stats().blocks_held == 0


@pytest.mark.parametrize("num_tenants", [1, 5000])
def test_counters_are_bounded(run, group, num_tenants) -> None:
    it = run(**SIZES, max_idle_tenants=64)
    for number in range(num_tenants):
        it.engine.submit(group(number, [1], max_tokens=1, tenant=f"tenant {number}"))
        it.step()
    it.drain()
    line = it.engine._scheduler.waiting
    assert len(line._classes[0].accounts) <= 64
