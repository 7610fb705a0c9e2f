"""Random lives of an engine: whatever joins, leaves, is pre-empted or expires, every answer is the model's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from ryzanstein.generation.tokens import FinishReason
from ryzanstein.worker.engine.messages import SubmitGroup

small_prompts = st.lists(st.integers(0, 1), min_size=1, max_size=30)


class EngineMachine(RuleBasedStateMachine):
    def __init__(self, run: Callable[..., Any], group: Callable[..., SubmitGroup], answer: Callable[..., Any]) -> None:
        super().__init__()
        self.it = run(num_blocks=14, block_size=4, max_sequences=5, token_budget=11, max_waiting=16)
        self.group = group
        self.answer = answer
        self.messages: dict[int, SubmitGroup] = {}
        self.cancelled: set[int] = set()
        self.finished: set[tuple[int, int]] = set()

    @rule(
        prompt=small_prompts,
        max_tokens=st.integers(1, 30),
        n=st.integers(1, 3),
        done=st.lists(st.integers(0, 30), min_size=3, max_size=3),
        stops=st.lists(st.integers(0, 96), max_size=8),
        min_tokens=st.integers(0, 6),
        priority=st.integers(0, 2),
        patience=st.none() | st.integers(1, 20),
    )
    def submit(self, *, prompt, max_tokens, n, done, stops, min_tokens, priority, patience) -> None:
        number = len(self.messages)
        sampling = {"n": n, "min_tokens": min(min_tokens, max_tokens), "stop_token_ids": stops}
        whole = self.group(number, prompt, max_tokens, **sampling)
        generated = [self.answer(whole, c)[0][: done[c]] for c in range(n)]
        deadline = None if patience is None else self.it.now + patience
        message = self.group(number, prompt, max_tokens, generated=generated, priority=priority, deadline=deadline, **sampling)
        self.messages[number] = message
        self.it.engine.submit(message)

    @precondition(lambda self: self.messages)
    @rule(data=st.data())
    def cancel(self, data) -> None:
        number = data.draw(st.sampled_from(sorted(self.messages)))
        self.cancelled.add(number)
        self.it.engine.cancel(number)

    @precondition(lambda self: self.messages)
    @rule(data=st.data(), choice=st.integers(0, 2))
    def finish(self, data, choice) -> None:
        number = data.draw(st.sampled_from(sorted(self.messages)))
        if (number, choice) not in self.it.ended:
            self.finished.add((number, choice))
        self.it.engine.finish(number, choice)

    @rule(times=st.integers(1, 12))
    def step(self, times) -> None:
        for _ in range(times):
            decoding = self.decoding()
            events = self.it.step()
            starved = decoding - set(zip(events.groups, events.choices, strict=True))
            assert len(starved) <= events.stats.preemptions - self.preemptions_before, "a decode was left out"
            assert events.step == len(self.it.ranks.plans)

    @rule(seconds=st.integers(1, 10))
    def wait(self, seconds) -> None:
        self.it.now += seconds
        self.step(1)

    def decoding(self) -> set[tuple[int, int]]:
        """The choices that must get a token in the next step, unless they are pre-empted in it."""
        self.preemptions_before = self.it.engine.stats().preemptions
        running = self.it.engine._scheduler.running
        dying = {n for n, m in self.messages.items() if m.deadline is not None and m.deadline <= self.it.now}
        return {(s.group.id, s.choice) for s in running if s.num_pending == 1 and s.group.id not in dying}

    def teardown(self) -> None:
        self.it.drain()
        stats = self.it.engine.stats()
        assert (stats.blocks_held, stats.running, stats.waiting) == (0, 0, 0), "something leaked"
        for number, message in self.messages.items():
            for choice in range(message.sampling.n):
                self.check(message, number, choice)

    def check(self, message: SubmitGroup, number: int, choice: int) -> None:
        tokens, reason = self.answer(message, choice)
        rest = tokens[len(message.generated[choice]) :]
        text = self.it.tokens.get((number, choice), [])
        assert text == rest[: len(text)], "not the model's answer"
        if number in self.it.failed or number in self.cancelled:
            return
        end = self.it.ended[number, choice]
        if (number, choice) in self.finished:
            assert end.reason in (FinishReason.STOP, reason)
        else:
            assert (text, end.reason) == (rest, reason)


@pytest.mark.long
def test_every_answer_is_the_models_whatever_happens_around_it(run, group, answer) -> None:
    run_state_machine_as_test(
        lambda: EngineMachine(run, group, answer),
        settings=settings(max_examples=250, stateful_step_count=30, deadline=None),
    )
