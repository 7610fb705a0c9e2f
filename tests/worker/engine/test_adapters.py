"""Adapters of groups: each fed token has the slot of its own group in the plan, and plans without any name none."""

from __future__ import annotations

import random
from typing import Any

from ryzanstein.worker.engine.plan import StepPlan

SLOTS = (0, 4, 0, 2, 4)


def slots_of(plan: StepPlan) -> list[int]:
    return [slot for slot, count in plan.adapters for _ in range(count)]


def test_each_token_has_the_slot_of_its_group(run: Any, group: Any) -> None:
    it = run(num_blocks=64, block_size=4, max_sequences=6, token_budget=13)
    rng, fed = random.Random(1), []
    execute = it.ranks.execute

    def watched(plan: StepPlan, rows: Any) -> Any:
        fed.append((plan, {s: row.prompt_ids[0] // 1000 for s, row in zip(plan.sampled, rows, strict=False)}))
        return execute(plan, rows)

    it.ranks.execute = watched
    for number, slot in enumerate(SLOTS):
        prompt = [1000 * (number + 1) + i for i in range(rng.randint(1, 30))]
        it.engine.submit(group(number + 1, prompt, n=2 if number == 3 else 1, adapter=slot))
    it.drain()
    mixed = 0
    for plan, known in fed:
        slots, first = slots_of(plan), 0
        assert len(slots) in (0, len(plan.token_ids))
        assert bool(slots) == any(slots)
        assert all(one != two for (one, _), (two, _) in zip(plan.adapters, plan.adapters[1:], strict=False))
        mixed += len(set(slots)) > 1
        for s, count in enumerate(plan.num_new):
            own = plan.token_ids[first : first + count]
            number = known.get(s, own[0] // 1000)
            assert (slots == [] and SLOTS[number - 1] == 0) or set(slots[first : first + count]) == {SLOTS[number - 1]}
            first += count
    assert mixed > 3, "no step had several adapters: the test shows little"


def test_without_adapters_plans_name_none(run: Any, group: Any) -> None:
    it = run(num_blocks=64, block_size=4, max_sequences=4, token_budget=16)
    for number in range(3):
        it.engine.submit(group(number, list(range(1, 20 + number))))
    it.drain()
    assert it.ranks.plans
    assert all(plan.adapters == [] for plan in it.ranks.plans)
