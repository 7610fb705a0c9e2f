"""Collects what a step, and the commands before it, produced, as the columns sent to the agent.

A request that the model cannot answer is distinguished from ranks that can answer nothing. Logits that
are not finite may come from a prompt that leads there on every node (a token whose embedding is broken,
a checkpoint that overflows), or from a faulty node (corrupted memory). Failing over is right in both
cases; blaming the node is right in only one. So the same ranks are given, at once, a token that has
nothing to do with the request.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from ryzanstein.errors import RyzansteinError
from ryzanstein.generation.request import SamplingParams
from ryzanstein.generation.tokens import FinishReason
from ryzanstein.worker.engine.messages import ChoiceEnd, EngineStats, GroupFailed, StepEvents
from ryzanstein.worker.engine.plan import Executor, OutOfMemory, SampledToken, SampleRow, SequencesFailed, StepPlan
from ryzanstein.worker.engine.sequence import Sequence

# Ids that every vocabulary has. Some of them may be broken themselves, or reserved and never
# trained.
_TOKENS = (1, 2, 3, 0)
_GREEDY = SamplingParams(temperature=0.0)


class RanksUnsound(Exception):
    """The ranks compute no finite logits for any input: they must be restarted."""


class Probe:
    """A probe that uses the executor of the steps."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    def require_sound(self, step: int, blocks: SequenceOf[int], num_groups: int) -> None:
        """Raises RanksUnsound if the ranks compute no finite logits for any probe token.

        `blocks` are the last ones, in each group of layers and then of hot pages, of a sequence that
        has failed; the probe writes to them, because they are not shared.
        """
        failure = ""
        tables = [[block] for block in blocks]
        hot_tables = tables[num_groups:]
        for token_id in _TOKENS:
            plan = StepPlan(
                step, [token_id], [1], [0], tables[:num_groups], [0], hot_tables=hot_tables, hot_first=[0] * len(hot_tables)
            )
            try:
                self._executor.execute(plan, [SampleRow(_GREEDY, 0, 0, [token_id], [])])
            except SequencesFailed as failed:
                failure = next(iter(failed.rows.values()), "")
            except OutOfMemory:
                return  # nothing was shown; a persistent fault is probed again at the next failed row
            else:
                return
        raise RanksUnsound(f"{failure}, nor are those of {len(_TOKENS)} single-token probes: the ranks are unsound")


class StepOutcome:
    """The outcome of a step, filled until `take`."""

    def __init__(self) -> None:
        self._clear()

    @property
    def empty(self) -> bool:
        happened = self._groups or self._ended or self._failed or self._accepted or self._paused
        reported = self._sealed or self._scores or self._returning or self._vectors or self._prefilled
        return not (happened or reported)

    def add_accepted(self, group: int) -> None:
        self._accepted.append(group)

    def add_token(self, sequence: Sequence, token: SampledToken) -> None:
        if token.logprob is not None:
            self._logprobs[len(self._groups)] = (token.logprob, list(token.top))
        self._groups.append(sequence.group.id)
        self._choices.append(sequence.choice)
        self._token_ids.append(token.token_id)

    def add_scores(self, sequence: Sequence, first: int, tokens: SequenceOf[SampledToken]) -> None:
        rows = [(token.logprob or 0.0, list(token.top[: sequence.group.num_top])) for token in tokens]
        self._scores.append((sequence.group.id, first, rows))

    def add_vector(self, group: int, vector: bytes) -> None:
        self._vectors.append((group, vector))

    def add_end(self, sequence: Sequence, reason: FinishReason) -> None:
        self._ended.append(ChoiceEnd(sequence.group.id, sequence.choice, int(reason), sequence.cached_tokens or 0))

    def add_paused(self, sequence: Sequence) -> None:
        self._paused.append((sequence.group.id, sequence.choice))

    def add_returning(self, choices: list[tuple[int, int, list[bytes]]]) -> None:
        self._returning += choices

    def add_sealed(self, group: int, names: list[bytes]) -> None:
        self._sealed.append((group, names))

    def add_prefilled(self, sequence: Sequence, num_computed: int | None = None) -> None:
        self._prefilled.append((sequence.group.id, sequence.num_computed if num_computed is None else num_computed))

    def add_failure(self, group: int, error: RyzansteinError) -> None:
        failed = GroupFailed(group, int(error.code), error.reason, error.message, dict(error.metadata), error.retry_after_s)
        self._failed.append(failed)

    def take(self, step: int, stats: EngineStats, step_s: float) -> StepEvents:
        """Returns everything since the last call."""
        events = StepEvents(
            step,
            self._groups,
            self._choices,
            self._token_ids,
            self._logprobs,
            self._ended,
            self._failed,
            stats,
            step_s,
            self._accepted,
            paused=self._paused,
            sealed=self._sealed,
            scores=self._scores,
            returning=self._returning,
            vectors=self._vectors,
            prefilled=self._prefilled,
        )
        self._clear()
        return events

    def _clear(self) -> None:
        self._groups: list[int] = []
        self._choices: list[int] = []
        self._token_ids: list[int] = []
        self._logprobs: dict[int, tuple[float, list[tuple[int, float]]]] = {}
        self._ended: list[ChoiceEnd] = []
        self._failed: list[GroupFailed] = []
        self._accepted: list[int] = []
        self._paused: list[tuple[int, int]] = []
        self._sealed: list[tuple[int, list[bytes]]] = []
        self._returning: list[tuple[int, int, list[bytes]]] = []
        self._scores: list[tuple[int, int, list[tuple[float, list[tuple[int, float]]]]]] = []
        self._vectors: list[tuple[int, bytes]] = []
        self._prefilled: list[tuple[int, int]] = []
