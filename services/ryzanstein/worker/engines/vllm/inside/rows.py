"""The choices in a batch of vLLM, and the decision of their next tokens by our own sampler.

A choice is an `engine.sequence.Sequence`, as in our engine: its penalties, bans, biases, constraint and
random draws are those of `sampling.sample`, computed from the prompt and all tokens generated so far, on
whatever node they were generated.

Legend: S rows of the batch, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace

import msgspec
import torch
from torch import Tensor

from ryzanstein.worker.constraints.matching import GrammarState
from ryzanstein.worker.engine.messages import SubmitGroup
from ryzanstein.worker.engine.plan import SequencesFailed, adjusts_logits, needs_full_logits
from ryzanstein.worker.engine.sequence import Account, SequenceGroup
from ryzanstein.worker.engine.sequence import Sequence as EngineSequence
from ryzanstein.worker.engines.asking import PROTOCOL, SIGN, AskedRow, ConstraintEnd
from ryzanstein.worker.engines.vllm.inside.grammars import Preparation, RowGrammars, failed
from ryzanstein.worker.kernels.native import NativeKernels
from ryzanstein.worker.sampling.drawing import draw
from ryzanstein.worker.sampling.sampler import sample
from ryzanstein.worker.sampling.sending import sent

logger = logging.getLogger("vllm.ryzanstein")


class BatchRow:
    """A request of an agent, which wants the tokens `forced`. `sequence`: what is to be sampled; None: nothing."""

    def __init__(self, forced: Sequence[int] = ()) -> None:
        self._forced = forced
        self.num_taken = 0
        """The tokens of the output that were taken."""
        self.sequence: EngineSequence | None = None

    @property
    def plain(self) -> bool:
        """Whether vLLM's own greedy choice is what is wanted, for all tokens."""
        return False

    def take(self, output_ids: Sequence[int]) -> None:
        """Takes the tokens that vLLM has generated for the request so far; it only grows."""
        for token_id in output_ids[self.num_taken :]:
            if token_id < 0:
                break  # not known yet: vLLM runs ahead of its own results
            self.num_taken += 1
            self._took(token_id)

    def begin(self, vocab_size: int) -> None:
        """Prepares for the first token. Waits for a constraint that is being compiled."""

    def forced(self) -> int | None:
        """Returns the token that must be next; None: any."""
        return self._forced[self.num_taken] if self.num_taken < len(self._forced) else None

    def fail(self, ending: ConstraintEnd) -> int | None:
        """Ends the choice if it has a way to say why; returns its next token, or None: that is left to vLLM."""
        return None

    def _took(self, token_id: int) -> None:
        """Takes one token, `num_taken` with it."""


class PreparingRow(BatchRow):
    """A request that asks how far something is."""

    def __init__(self, preparation: Preparation) -> None:
        super().__init__()
        self._preparation = preparation

    def forced(self) -> int:
        return self._preparation.answer(self.num_taken)


class ChoiceRow(BatchRow):
    """A choice without a constraint."""

    def __init__(self, sequence: EngineSequence) -> None:
        super().__init__()
        self.sequence = self._own = sequence

    @property
    def plain(self) -> bool:
        return not needs_full_logits(self._own.row)

    def _took(self, token_id: int) -> None:
        self._own.append(token_id)


class FreeRow(ChoiceRow):
    """A choice whose next token is drawn from the model's own logits, whatever came before: only their number counts."""

    def count(self, num_output: int) -> None:
        """Takes as many tokens as vLLM has generated for the request so far. They need not be known."""
        self._own.row.index += num_output - self.num_taken
        self.num_taken = num_output

    def _took(self, token_id: int) -> None:
        self._own.row.index += 1


class ConstrainedRow(BatchRow):
    """A choice with a constraint. After its last token come the escape token and an `ConstraintEnd`.

    `state`: the constraint after the tokens that the request came with; None: its table is not known.
    """

    def __init__(
        self,
        asked: AskedRow,
        message: SubmitGroup,
        state: Future[GrammarState] | None,
        grammars: RowGrammars,
    ) -> None:
        super().__init__()
        self._message, self._choice, self._compiling = message, asked.choice, state
        self._grammars, self._table, self._escape = grammars, asked.table, asked.escape
        self._end: list[int] = []
        self._end_index = 0
        self._state: GrammarState | None = None

    def begin(self, vocab_size: int) -> None:
        if self.sequence is not None or self._end:
            return
        state = _result(self._compiling)
        if state is None or self._grammars.vocab_size(self._table) != vocab_size:
            self.fail(ConstraintEnd.NOT_COMPILED)
            return
        self._state, self.sequence = state, _sequence(self._message, self._choice, state)
        self._look(state, None)

    def forced(self) -> int | None:
        return self._end[min(self.num_taken - self._end_index, len(self._end) - 1)] if self._end else None

    def fail(self, ending: ConstraintEnd) -> int:
        self._end, self._end_index = [self._escape, ending], self.num_taken
        return self._escape

    def _took(self, token_id: int) -> None:
        if self.sequence is not None and self._state is not None and not self._end:
            self.sequence.append(token_id)
            self._look(self._state, token_id)

    def _look(self, state: GrammarState, last: int | None) -> None:
        """Ends the choice if its constraint allows nothing to follow."""
        if (ending := failed(state)) is not None:
            self.fail(ending)
        elif last == self._escape:
            self._end, self._end_index = (
                [ConstraintEnd.DRAWN if state.finished else ConstraintEnd.NAMES_THE_END],
                self.num_taken,
            )
        elif state.finished:
            self.fail(ConstraintEnd.COMPLETE)


def new_row(asked: AskedRow, token_ids: Sequence[int], grammars: RowGrammars) -> BatchRow:
    """Returns the row of a request that came with these tokens, prompt and generated."""
    if asked.probes:
        return BatchRow([*SIGN, PROTOCOL, *grammars.version()])
    if asked.prepares:
        return PreparingRow(grammars.prepare(asked))
    if (free := free_row(asked, len(token_ids))) is not None:
        return free
    if asked.group is None or asked.num_prompt > len(token_ids):
        return BatchRow()  # with fewer tokens than were asked about it is left to vLLM
    generated = [list(token_ids[asked.num_prompt :]) if i == asked.choice else [] for i in range(len(asked.group.generated))]
    # Log probabilities are vLLM's, of the model's own logits.
    sampling = replace(asked.group.sampling, logprobs=None)
    prompt_ids = list(token_ids[: asked.num_prompt])
    message = msgspec.structs.replace(asked.group, prompt_ids=prompt_ids, generated=generated, sampling=sampling)
    if sampling.constraint is None:
        return ChoiceRow(_sequence(message, asked.choice))
    state = grammars.state(asked, message, generated[asked.choice])
    return ConstrainedRow(asked, message, state, grammars)


def is_plain(asked: AskedRow) -> bool:
    """Returns whether vLLM's own greedy choices are what is wanted, whatever the tokens of the request are."""
    begun = _untold(asked, asked.num_prompt)
    return begun is not None and not needs_full_logits(begun.row)


def free_row(asked: AskedRow, num_tokens: int) -> FreeRow | None:
    """Returns the row of a request that came with so many tokens, if what they are does not matter."""
    begun = _untold(asked, num_tokens)
    if begun is None or begun.row.sampling.temperature == 0 or adjusts_logits(begun.row):
        return None
    return FreeRow(begun)


def _untold(asked: AskedRow, num_tokens: int) -> EngineSequence | None:
    """Returns the choice, of which only the number of its tokens is known; None: nothing can be said without them."""
    group = asked.group
    if group is None or asked.probes or asked.prepares or group.sampling.constraint is not None or group.bad_sequences:
        return None
    if (num_generated := num_tokens - asked.num_prompt) < 0:
        return None
    sampling = replace(group.sampling, logprobs=None)
    generated = [[0] * num_generated if i == asked.choice else [] for i in range(len(group.generated))]
    return _sequence(msgspec.structs.replace(group, prompt_ids=[0], generated=generated, sampling=sampling), asked.choice)


def _sequence(message: SubmitGroup, choice: int, state: GrammarState | None = None) -> EngineSequence:
    return EngineSequence(SequenceGroup(message, 0, 0.0, Account("")), choice, state)


def _result(compiling: Future[GrammarState] | None) -> GrammarState | None:
    """Waits for a constraint; returns None if it cannot be followed here."""
    try:
        return None if compiling is None else compiling.result()
    except Exception as error:  # of whatever kind: the choice ends with it, not vLLM
        logger.warning("a constraint could not be compiled: %s", error)
        return None


def decide(
    logits_SV: Tensor, rows: Mapping[int, BatchRow], grammars: RowGrammars, kernels: NativeKernels | None = None
) -> dict[int, int]:
    """Leaves one token of each of these rows finite, in place: the one that is next. Returns those that the host knows.

    The tokens are the same with kernels, which are for logits on a CPU, as with torch. Without, those of free rows stay on
    the device, and nothing waits for it.

    Plain rows, and those without finite logits that have no way to say so, are left to vLLM. Never raises for what a
    request or a model can cause.
    """
    for row in rows.values():
        row.begin(logits_SV.shape[1])
    tokens = {s: token for s, row in rows.items() if (token := row.forced()) is not None}
    left = {s: row for s, row in rows.items() if s not in tokens and row.sequence is not None and not row.plain}
    if kernels is None:
        free = {s: row for s, row in left.items() if isinstance(row, FreeRow)}
        draw(logits_SV, {s: row.sequence.row for s, row in free.items() if row.sequence is not None})
        left = {s: row for s, row in left.items() if s not in free}
    tokens |= _sampled(logits_SV, left, grammars, kernels)
    # Whoever reaches vLLM may name an escape token that no vocabulary has.
    tokens = {s: token for s, token in tokens.items() if 0 <= token < logits_SV.shape[1]}
    if not tokens:
        return {}
    index_R, token_R = sent([*tokens], logits_SV.device), sent([*tokens.values()], logits_SV.device)
    logits_SV[index_R] = -torch.inf
    logits_SV[index_R, token_R] = 0.0
    return tokens


def _sampled(
    logits_SV: Tensor, rows: Mapping[int, BatchRow], grammars: RowGrammars, kernels: NativeKernels | None
) -> dict[int, int]:
    """Returns the next tokens of these rows, and of those that fail what says so."""
    sequences = {s: row.sequence.row for s, row in rows.items() if row.sequence is not None}
    allowed_RW = grammars.masks(list(sequences.values()), logits_SV.shape[1])
    failures = {s: ending for s, row in sequences.items() if (ending := failed(row.constraint)) is not None}
    tokens: dict[int, int] = {}
    while left := [s for s in sequences if s not in failures]:
        places = [r for r, s in enumerate(sequences) if s not in failures]
        logits_RV = logits_SV[sent(left, logits_SV.device)].float()
        try:
            sampled = sample(
                logits_RV, [sequences[s] for s in left], kernels, None if allowed_RW is None else allowed_RW[places]
            )
        except SequencesFailed as unsound:
            failures |= {left[r]: ConstraintEnd.NOT_FINITE for r in unsound.rows}
        else:
            tokens = {s: token.token_id for s, token in zip(left, sampled, strict=True)}
            break
    said = {s: token for s, ending in failures.items() if (token := rows[s].fail(ending)) is not None}
    return tokens | said
