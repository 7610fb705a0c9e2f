"""The sequences of one step, collected by the scheduler and sent to the ranks as a plan."""

from __future__ import annotations

from itertools import chain

from ryzanstein.worker.engine.messages import Pool
from ryzanstein.worker.engine.plan import AdapterRun, SampleRow, StateRun, StepPlan, needs_full_logits
from ryzanstein.worker.engine.scheduling.pace import num_pairs
from ryzanstein.worker.engine.sequence import Sequence

Members = list[tuple[Sequence, int]]


class Batch:
    """A batch: which sequences feed how many tokens. `num_groups` are the groups of layers.

    `sampled` are the members that get a new token, parallel to `rows`. `scored` are the parts of
    prompts whose tokens are scored: whose, from which token, and how many. `pooled` are those whose
    hidden states are wanted: whose, and how many. `unfinished` are those of whose tokens only a part
    is fed. `num_pairs` are those of prompt tokens and of what they read.
    """

    def __init__(self, num_groups: int) -> None:
        self._num_groups = num_groups
        self.members: Members = []
        self.sampled: list[Sequence] = []
        self.rows: list[SampleRow] = []
        self.scored: list[tuple[Sequence, int, int]] = []
        self.pooled: list[tuple[Sequence, int]] = []
        self.unfinished: list[Sequence] = []
        self.num_tokens = 0
        self.num_decodes = 0
        self.num_pairs = 0.0
        self._token_ids: list[int] = []
        self._num_new: list[int] = []
        self._num_context: list[int] = []
        self._sampled: list[int] = []
        self._scored: list[int] = []
        self._targets: list[int] = []
        self._pooled: list[int] = []
        self._adapters: list[AdapterRun] = []
        self._adapted = False

    def __len__(self) -> int:
        return len(self.members)

    def decode(self, sequence: Sequence) -> None:
        """Feeds the one token that is not computed yet."""
        self.num_decodes += 1
        self._token_ids.append((sequence.generated or sequence.group.message.prompt_ids)[-1])
        self._add(sequence, 1)

    def prefill(self, sequence: Sequence, num: int) -> None:
        """Feeds the next `num` tokens."""
        start = sequence.num_computed
        self.num_pairs += num_pairs(num, start)
        self._token_ids += sequence.tokens(start, start + num)
        self._add(sequence, num)

    def feed(self, sequence: Sequence, num: int) -> None:
        """Feeds the next `num` tokens as a decode or a prefill."""
        if sequence.num_pending == 1:
            self.decode(sequence)
        else:
            self.prefill(sequence, num)

    def halves(self) -> tuple[Members, Members]:
        """Returns what to feed in two smaller batches, one after the other.

        The second is empty for a single token.
        """
        if len(self.members) > 1:
            middle = len(self.members) // 2
            return self.members[:middle], self.members[middle:]
        ((sequence, num),) = self.members
        return ([(sequence, num // 2)], [(sequence, num - num // 2)]) if num > 1 else (self.members, [])

    def plan(self, step: int, runs: list[StateRun]) -> StepPlan:
        """Returns the plan of this batch. `runs` are those of its tokens, if layers keep a state.

        The plan shares the sequences' block tables: it is valid until the step's update changes
        them.
        """
        by_group = list(zip(*(sequence.tables for sequence, _ in self.members), strict=True))
        tables = list(chain(*by_group[: self._num_groups]))
        hot = list(chain(*by_group[self._num_groups :]))
        first_pages = [table.first for table in tables]
        return StepPlan(
            step,
            self._token_ids,
            self._num_new,
            self._num_context,
            [table.blocks for table in tables],
            self._sampled,
            any(needs_full_logits(row) for row in self.rows),
            first_pages if any(first_pages) else [],
            self._scored,
            self._targets,
            max((sequence.group.num_top for sequence, _, _ in self.scored), default=0),
            hot_tables=[table.blocks for table in hot],
            hot_first=[table.first for table in hot],
            pooled=self._pooled,
            runs=runs,
            adapters=self._adapters if self._adapted else [],
        )

    def of_row(self, row: int) -> Sequence:
        """Returns the sequence of a row of the executor's result."""
        if row < len(self.sampled):
            return self.sampled[row]
        row -= len(self.sampled)
        parts = [(sequence, count) for sequence, _, count in self.scored] + self.pooled
        for sequence, count in parts:
            if row < count:
                return sequence
            row -= count
        raise IndexError(row)

    def _score(self, sequence: Sequence, num: int) -> None:
        """Scores the prompt tokens that follow the fed ones and have no score yet."""
        group, begin = sequence.group, sequence.num_computed
        first, end = max(begin + 1, group.num_scored), min(begin + num + 1, group.num_prompt)
        if first < end:
            row = self.num_tokens - begin - 1
            self._scored += range(row + first, row + end)
            self._targets += group.message.prompt_ids[first:end]
            self.scored.append((sequence, first, end - first))

    def _pool(self, pool: Pool, sequence: Sequence, num: int) -> None:
        """Asks for the hidden states of the fed tokens that count and are not known yet."""
        begin = sequence.num_computed
        first, end = max(begin, pool.first), begin + num
        if first < end:
            row = self.num_tokens - begin
            self._pooled += range(row + first, row + end)
            self.pooled.append((sequence, end - first))

    def _adapt(self, slot: int, num: int) -> None:
        self._adapted = self._adapted or slot != 0
        if self._adapters and self._adapters[-1][0] == slot:
            num += self._adapters.pop()[1]
        self._adapters.append((slot, num))

    def _add(self, sequence: Sequence, num: int) -> None:
        if sequence.group.num_scored < sequence.group.num_prompt:
            self._score(sequence, num)
        if sequence.group.pool is not None:
            self._pool(sequence.group.pool, sequence, num)
        elif num == sequence.num_pending:
            self._sampled.append(len(self.members))
            self.sampled.append(sequence)
            self.rows.append(sequence.row)
        else:
            self.unfinished.append(sequence)
        self._adapt(sequence.group.message.adapter, num)
        self.num_tokens += num
        self.members.append((sequence, num))
        self._num_new.append(num)
        self._num_context.append(sequence.num_computed)
