"""An engine with a runner in this process, for conversations that arrive at random times."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from ryzanstein.generation.request import SamplingParams
from ryzanstein.worker.engine.engine import Engine
from ryzanstein.worker.engine.extents import EngineSettings
from ryzanstein.worker.engine.messages import SubmitGroup
from ryzanstein.worker.engine.plan import PageMove, Rearrangement, SampledToken, SampleRow, StepPlan
from ryzanstein.worker.model.runner import ModelRunner


class LoneRank:
    """One rank without a process."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.num_fed = 0

    def execute(self, plan: StepPlan, rows: Sequence[SampleRow]) -> list[SampledToken]:
        self.num_fed += len(plan.token_ids)
        return ModelRunner.execute(self._runner, plan, rows)

    def rearrange(self, change: Rearrangement) -> None:
        self._runner.rearrange(change)

    def move_pages(self, move: PageMove) -> None:
        raise NotImplementedError


def check_company(loaded: Any) -> None:
    """Asserts that each request gets the same tokens and logprobs alone in a fresh engine as among others.

    They share beginnings, and the pool is small: pages are reused, and leave.
    """
    rng = random.Random(3)
    texts = [[rng.randrange(3, 251) for _ in range(170)] for _ in range(2)]
    prompts = [
        rng.choice(texts)[: rng.randint(20, 170)] + [rng.randrange(3, 251) for _ in range(rng.randint(0, 20))]
        for _ in range(10)
    ]
    messages = [_conversation(rng, group, prompt) for group, prompt in enumerate(prompts)]
    alone = [_serve(loaded, 7 + 4 * group, [message], rng) for group, message in enumerate(messages)]
    together, num_fed = _serve(loaded, 48, messages, rng)
    assert together == {group: answers[group] for group, (answers, _) in enumerate(alone)}
    assert num_fed < 0.9 * sum(fed for _, fed in alone), "nothing was reused: the test shows little"


def _conversation(rng: random.Random, group: int, prompt: list[int]) -> SubmitGroup:
    sampling = SamplingParams(temperature=0.0, logprobs=0)
    return SubmitGroup(group, prompt, sampling, rng.randint(1, 40), [], [[]], [False])


def _serve(loaded: Any, budget: int, messages: Sequence[SubmitGroup], rng: random.Random) -> tuple[dict[int, Any], int]:
    """The tokens and logprobs of groups that arrive at random times, and how many tokens were computed."""
    rank = LoneRank(loaded)
    hot_tokens = loaded.extents.hot_tokens or 0
    settings = EngineSettings(
        loaded.num_blocks,
        16,
        4,
        budget,
        windows=loaded.extents.windows,
        hot_tokens=hot_tokens,
        hot_pages=loaded.hot_pages,
        lasting=loaded.extents.lasting,
        num_states=loaded.num_states,
    )
    engine, found = Engine(settings, rank), {message.group: [] for message in messages}
    waiting = list(messages)
    for _ in range(2000):
        if waiting and (rng.random() < 0.3 or not engine.has_work):
            engine.submit(waiting.pop(0))
        if not waiting and not engine.has_work:
            break
        events = engine.step()
        assert not events.failed
        for row, (group, token) in enumerate(zip(events.groups, events.token_ids, strict=True)):
            found[group].append((token, events.logprobs[row][0]))
    return found, rank.num_fed
