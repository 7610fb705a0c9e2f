"""An executor whose tokens are a pure function of a choice's tokens so far, and that checks what it is told as ranks would."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import fields
from itertools import accumulate
from typing import Any

import pytest

from ryzanstein.generation.request import SamplingParams
from ryzanstein.generation.tokens import FinishReason
from ryzanstein.worker.engine.engine import Engine
from ryzanstein.worker.engine.extents import EngineSettings
from ryzanstein.worker.engine.messages import ChoiceEnd, GroupFailed, StepEvents, SubmitGroup
from ryzanstein.worker.engine.plan import (
    OutOfMemory,
    PageMove,
    Rearrangement,
    SampledToken,
    SampleRow,
    SequencesFailed,
    StepPlan,
    needs_full_logits,
)
from ryzanstein.worker.settings.rank_settings import QueueSettings

VOCABULARY = 97


def next_token(tokens: Sequence[int], choice: int, banned: Sequence[int] = ()) -> int:
    """What the fake model says after `tokens`: depends on every one of them and on the choice."""
    value = 7 * choice + 1
    for token in tokens:
        value = (value * 31 + token + 1) % 1_000_003
    while value % VOCABULARY in banned:
        value += 1
    return value % VOCABULARY


def expected_answer(message: SubmitGroup, choice: int) -> tuple[list[int], FinishReason]:
    """The whole answer of a choice, and why it ends, by the definitions and nothing else."""
    generated = list(message.generated[choice])
    while True:
        banned = message.stop_token_ids if len(generated) < message.sampling.min_tokens else ()
        stopped = bool(generated) and generated[-1] in message.stop_token_ids
        if stopped and len(generated) > message.sampling.min_tokens:
            return generated, FinishReason.STOP
        if len(generated) >= message.max_tokens:
            return generated, FinishReason.LENGTH
        generated.append(next_token([*message.prompt_ids, *generated], choice, banned))


class FakeRanks:
    """Keeps a KV cache of token ids by block. Samples from what the cache says, so a wrong table gives a wrong answer."""

    def __init__(self, settings: EngineSettings) -> None:
        self.settings = settings
        self.windows = settings.windows
        self.hot: list[list[int | None]] = [[None] * settings.block_size for _ in range(settings.hot_pages)]
        self.cache: list[list[tuple[int, int] | None]] = [
            [None] * settings.block_size for _ in range(settings.num_blocks + settings.borrowable_blocks)
        ]
        self.states: list[list[int]] = [[VOCABULARY] for _ in range(settings.num_states + 2)]
        self.slab: dict[int, list[int | None]] = {}
        self.plans: list[StepPlan] = []
        self.failing: Callable[[SampleRow], bool] = lambda row: False
        self.short: Callable[[StepPlan], bool] = lambda plan: False
        self.cost_s: Callable[[StepPlan], float] = lambda plan: 0.0
        self.busy_s = 0.0
        self.released_from = len(self.cache)

    def execute(self, plan: StepPlan, rows: Sequence[SampleRow]) -> list[SampledToken]:
        self.plans.append(plan)
        self.busy_s += self.cost_s(plan)
        assert len(plan.token_ids) == sum(plan.num_new) <= self.settings.token_budget
        assert 0 < len(plan.num_new) <= self.settings.max_sequences
        assert plan.full_logits == any(map(needs_full_logits, rows))
        size = self.settings.block_size
        assert len(plan.block_tables) == len(self.windows) * len(plan.num_new)
        self._write_hot(plan)
        self._write_states(plan)
        written: set[tuple[int, int]] = set()
        for group in range(len(self.windows)):
            position = 0
            for s, (num_new, num_context) in enumerate(zip(plan.num_new, plan.num_context, strict=True)):
                assert num_new > 0
                table = self._table(plan, group, s)
                assert len(set(table.values())) == len(table)
                for p in range(num_context, num_context + num_new):
                    slot = (table[p // size], p % size)
                    assert slot not in written, "two sequences write one slot"
                    written.add(slot)
                    self.cache[slot[0]][slot[1]] = (group, plan.token_ids[position])
                    position += 1
        if self.short(plan):
            raise OutOfMemory("rank 1: no memory for the step")
        bad = {i: "logits are not numbers" for i, row in enumerate(rows) if self.failing(row)}
        if bad:
            raise SequencesFailed(bad)
        sampled = [self._sample(plan, s, row) for s, row in zip(plan.sampled, rows, strict=True)]
        scored = [self._score(plan, t, target) for t, target in zip(plan.scored, plan.targets, strict=True)]
        return [*sampled, *scored, *(self._hidden(plan, t) for t in plan.pooled)]

    def _hidden(self, plan: StepPlan, t: int) -> SampledToken:
        """The hidden state of a row is the token that was fed there: a wrong row gives a wrong vector."""
        return SampledToken(0, hidden=array("f", [float(plan.token_ids[t])]).tobytes())

    def _score(self, plan: StepPlan, t: int, target: int) -> SampledToken:
        """The score of a target is the token that was fed before it: a wrong row gives a wrong score."""
        return SampledToken(target, -float(plan.token_ids[t]), tuple((rank, -0.5) for rank in range(plan.num_top)))

    def rearrange(self, change: Rearrangement) -> None:
        assert len({target for _, target in change.moves}) == len(change.moves)
        for source, target in change.moves:
            assert target < change.num_blocks
            self.cache[target] = list(self.cache[source])
        for block in range(change.num_blocks, len(self.cache)):
            self.cache[block] = [None] * self.settings.block_size
        self.released_from = change.num_blocks

    def move_pages(self, move: PageMove) -> None:
        for place, block in move.pages:
            if move.out:
                self.slab[place] = list(self.cache[block])
            else:
                self.cache[block] = list(self.slab[place])
        for place, block in move.hot:
            if move.out:
                self.slab[place] = list(self.hot[block])
            else:
                self.hot[block] = list(self.slab[place])

    def _write_hot(self, plan: StepPlan) -> None:
        size, position = self.settings.block_size, 0
        assert len(plan.hot_tables) == len(plan.hot_first) == (len(plan.num_new) if self.hot else 0)
        written: set[tuple[int, int]] = set()
        for s, (table, first) in enumerate(zip(plan.hot_tables, plan.hot_first, strict=True)):
            for p in range(plan.num_context[s], plan.num_context[s] + plan.num_new[s]):
                slot = (table[p // size - first], p % size)
                assert slot not in written, "two sequences write one slot of a hot page"
                written.add(slot)
                self.hot[slot[0]][slot[1]] = plan.token_ids[position]
                position += 1

    def _write_states(self, plan: StepPlan) -> None:
        """A state is all tokens up to it. A step that does not count leaves what it wrote behind, as ranks do."""
        if not self.settings.num_states:
            assert not plan.runs
            return
        if not plan.runs:  # a probe
            assert not any(plan.num_context)
            return
        counts, position, targets = list(plan.num_new), 0, [target for _, _, target in plan.runs]
        assert len(set(targets)) == len(targets), "two runs write one slot"
        assert all(0 <= target < self.settings.num_states for target in targets)
        for count, source, target in plan.runs:
            assert count > 0
            assert source != target
            before = [] if source < 0 else self.states[source]
            self.states[target] = [*before, *plan.token_ids[position : position + count]]
            position, counts[0] = position + count, counts[0] - count
            if counts[0] == 0:
                del counts[0]
        assert not counts, "runs do not divide the sequences"

    def _check_state(self, plan: StepPlan, s: int, tokens: list[int]) -> None:
        ends = list(accumulate(count for count, _, _ in plan.runs))
        last = ends.index(sum(plan.num_new[: s + 1]))
        assert self.states[plan.runs[last][2]] == tokens, "the state is that of other tokens than the sequence's"

    def _check_hot(self, plan: StepPlan, s: int, tokens: list[int]) -> None:
        """What the step's tokens read hot are theirs: all positions of pages that the first of them does not see cold."""
        size, table, first = self.settings.block_size, plan.hot_tables[s], plan.hot_first[s]
        context = plan.num_context[s]
        cold = [page for page in range(len(tokens)) if context - (page * size + size - 1) >= self.settings.hot_tokens]
        begin = min((max(cold, default=-1) + 1) * size, context)
        seen = [self.hot[table[p // size - first]][p % size] for p in range(begin, len(tokens))]
        assert seen == tokens[begin:], "hot pages hold other tokens than the sequence"

    def _table(self, plan: StepPlan, group: int, s: int) -> dict[int, int]:
        """The block of each page that the plan names."""
        i = group * len(plan.num_new) + s
        blocks, first = plan.block_tables[i], plan.first_pages[i] if plan.first_pages else 0
        lasting = [page for page in range(first) if self._lasts(group, page)]
        return dict(zip([*lasting, *range(first, first + len(blocks) - len(lasting))], blocks, strict=True))

    def _lasts(self, group: int, page: int) -> bool:
        """Whether the group reads a page that has left its window."""
        if not self.settings.lasting or (lasting := self.settings.lasting[group]) is None:
            return False
        return page * self.settings.block_size < lasting.sinks or bool(lasting.stride and page % lasting.stride == 0)

    def _sample(self, plan: StepPlan, s: int, row: SampleRow) -> SampledToken:
        size = self.settings.block_size
        num_tokens = plan.num_context[s] + plan.num_new[s]
        tokens = [*row.prompt_ids, *row.generated_ids]
        for group, window in enumerate(self.windows):
            table = self._table(plan, group, s)
            begin = 0 if window is None else max(0, plan.num_context[s] + 1 - window)
            places = [p for p in range(num_tokens) if p >= begin or self._lasts(group, p // size)]
            seen = [self.cache[table[p // size]][p % size] for p in places]
            assert seen == [(group, tokens[p]) for p in places], "the cache holds other tokens than the sequence"
        if self.hot:
            self._check_hot(plan, s, tokens[:num_tokens])
        if plan.runs:
            self._check_state(plan, s, tokens[:num_tokens])
        assert row.index == len(row.generated_ids)
        token = next_token(tokens, row.choice, row.banned_ids)
        if row.sampling.logprobs is None:
            return SampledToken(token)
        return SampledToken(token, -0.5, tuple((token, -0.5) for _ in range(row.sampling.logprobs)))


_QUEUE = [each.name for each in fields(QueueSettings)]


class Run:
    """An engine on fake ranks, and all that it said, by choice. Time passes by `now` and by what steps cost."""

    def __init__(self, **settings: Any) -> None:
        queue = {name: settings.pop(name) for name in _QUEUE if name in settings}
        self.settings = EngineSettings(**settings, queue=QueueSettings(**{"max_waiting": 1024, **queue}))
        self.ranks = FakeRanks(self.settings)
        self.now = 1000.0
        self.engine = Engine(self.settings, self.ranks, lambda: self.time, lambda: self.time)
        self.tokens: dict[tuple[int, int], list[int]] = {}
        self.ended: dict[tuple[int, int], ChoiceEnd] = {}
        self.failed: dict[int, GroupFailed] = {}

    @property
    def time(self) -> float:
        return self.now + self.ranks.busy_s

    def step(self) -> StepEvents:
        events = self.engine.step()
        for group, choice, token in zip(events.groups, events.choices, events.token_ids, strict=True):
            assert (group, choice) not in self.ended, "a token after the end"
            assert group not in self.failed, "a token after the failure"
            self.tokens.setdefault((group, choice), []).append(token)
        for end in events.ended:
            assert (end.group, end.choice) not in self.ended, "two ends of one choice"
            self.ended[end.group, end.choice] = end
        for failure in events.failed:
            assert failure.group not in self.failed, "two failures of one group"
            self.failed[failure.group] = failure
        return events

    def drain(self, max_steps: int = 10_000) -> None:
        for _ in range(max_steps):
            if not self.engine.has_work:
                return
            self.step()
        raise AssertionError("the engine does not come to an end")


@pytest.fixture(scope="session")
def run() -> Callable[..., Run]:
    """Makes a Run; keyword arguments are those of EngineSettings and of QueueSettings."""
    return Run


@pytest.fixture(scope="session")
def answer() -> Callable[[SubmitGroup, int], tuple[list[int], FinishReason]]:
    return expected_answer


@pytest.fixture(scope="session")
def group() -> Callable[..., SubmitGroup]:
    """Makes a SubmitGroup; keyword arguments beyond its own fields go to SamplingParams."""

    def make(group: int, prompt_ids: Sequence[int], max_tokens: int = 8, **given: Any) -> SubmitGroup:
        own = {name: given.pop(name) for name in list(given) if name in SubmitGroup.__struct_fields__}
        sampling = SamplingParams(**{"temperature": 0.0, **given})
        own.setdefault("stop_token_ids", [])
        own.setdefault("generated", [[] for _ in range(sampling.n)])
        own.setdefault("finished", [False] * sampling.n)
        return SubmitGroup(group, list(prompt_ids), sampling, max_tokens, **own)

    return make
