"""What the engine makes of constraints: ends, failures, continuations. Which tokens they allow is the ranks' business."""

from __future__ import annotations

from dataclasses import dataclass, field

from ryzanstein.errors import CONSTRAINT_FAILED
from ryzanstein.generation.request import SamplingParams
from ryzanstein.generation.tokens import FinishReason
from ryzanstein.worker.engine.plan import SampleRow, needs_full_logits


@dataclass
class Counting:
    """A constraint that is complete after so many tokens, or fails at one."""

    complete_at: int = 10**9
    fails_at: int = 10**9
    taken: list[int] = field(default_factory=list)
    ready: bool = True
    cost_s: float = 0.0

    @property
    def finished(self) -> bool:
        return len(self.taken) >= self.complete_at

    @property
    def failure(self) -> str:
        return "too complex" if len(self.taken) >= self.fails_at else ""

    def accept(self, token_id: int) -> None:
        self.taken.append(token_id)


def test_a_choice_ends_where_its_constraint_lets_nothing_follow(run, group, answer) -> None:
    it = run(num_blocks=64, block_size=4)
    message = group(1, [1, 2, 3], max_tokens=30, n=2, min_tokens=20)
    constraints = [Counting(5), Counting(9)]
    it.engine.submit(message, constraints)
    it.drain()
    for choice, length in ((0, 5), (1, 9)):
        assert it.tokens[1, choice] == constraints[choice].taken == answer(message, choice)[0][:length]
        assert it.ended[1, choice].reason == FinishReason.STOP


def test_a_choice_whose_constraint_is_not_ready_sits_out_the_steps(run, group, answer) -> None:
    it = run(num_blocks=64, block_size=4, max_sequences=8, token_budget=64)
    slow, other = group(1, [1] * 5, max_tokens=6), group(2, [2] * 5, max_tokens=20)
    constraint = Counting()
    it.engine.submit(slow, [constraint])
    it.engine.submit(other)
    it.step()
    constraint.ready = False
    for _ in range(10):
        assert it.step().groups == [2]
    assert not it.engine.starves
    constraint.ready = True
    it.drain()
    assert it.tokens[1, 0] == answer(slow, 0)[0]
    assert it.tokens[2, 0] == answer(other, 0)[0]


def test_an_engine_in_which_all_wait_for_their_constraints_runs_nothing(run, group, answer) -> None:
    it = run(num_blocks=64, block_size=4)
    message, constraint = group(1, [1] * 5, max_tokens=6), Counting()
    it.engine.submit(message, [constraint])
    it.step()
    constraint.ready = False
    before = len(it.ranks.plans)
    assert it.step().groups == []
    assert (it.engine.starves, len(it.ranks.plans)) == (True, before)
    constraint.ready = True
    it.drain()
    assert it.tokens[1, 0] == answer(message, 0)[0]


def test_an_expensive_constraint_is_charged_to_its_tenant(run, group) -> None:
    counters = []
    for cost_s in (0.0, 1.0):
        it = run(num_blocks=64, block_size=4)
        it.ranks.cost_s = lambda plan: 0.1
        it.engine.submit(group(1, [1] * 5, max_tokens=6), [Counting(cost_s=cost_s)])
        for _ in range(3):
            it.step()
        (sequence,) = it.engine._scheduler.running
        counters.append(sequence.group.account.counter)
    assert counters[1] > counters[0] + 2


def test_a_failing_constraint_fails_its_group_alone_and_gives_no_token(run, group, answer) -> None:
    it = run(num_blocks=64, block_size=4, max_sequences=8, token_budget=64)
    failing, other = group(1, [1] * 5, max_tokens=30, n=3), group(2, [2] * 5, max_tokens=30)
    it.engine.submit(failing, [Counting(4), Counting(fails_at=4), Counting(20)])
    it.engine.submit(other)
    it.drain()
    assert it.failed[1].reason == CONSTRAINT_FAILED
    assert len(it.tokens[1, 1]) == 3
    assert it.tokens[2, 0] == answer(other, 0)[0]
    assert it.engine.stats().blocks_held == 0


def test_a_continuation_that_was_complete_ends_at_once(run, group) -> None:
    it = run(num_blocks=64, block_size=4)
    complete = Counting(2, taken=[5, 6])
    it.engine.submit(group(1, [1, 2], generated=[[5, 6]]), [complete])
    it.drain()
    assert (it.tokens, it.ended[1, 0].reason) == ({}, FinishReason.STOP)


def test_a_continuation_that_breaks_its_constraint_is_refused(run, group) -> None:
    it = run(num_blocks=64, block_size=4)
    it.engine.submit(group(1, [1, 2], generated=[[5]]), [Counting(fails_at=1, taken=[5])])
    it.drain()
    assert it.failed[1].reason == CONSTRAINT_FAILED
    assert it.tokens == {}


def test_a_paused_sequence_takes_each_token_once(run, group, answer) -> None:
    it = run(num_blocks=9, block_size=2, max_sequences=4, token_budget=16)
    messages = [group(i, [i] * 3, max_tokens=10) for i in range(1, 4)]
    constraints = [Counting() for _ in messages]
    for message, constraint in zip(messages, constraints, strict=True):
        it.engine.submit(message, [constraint])
    it.drain()
    assert it.engine.stats().preemptions > 0
    for message, constraint in zip(messages, constraints, strict=True):
        assert constraint.taken == it.tokens[message.group, 0] == answer(message, 0)[0]


def test_a_constrained_row_needs_all_logits() -> None:
    assert needs_full_logits(SampleRow(SamplingParams(temperature=0), 0, 0, (), (), constraint=Counting()))
