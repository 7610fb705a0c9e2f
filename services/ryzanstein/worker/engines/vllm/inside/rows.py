"""The choices in a batch of vLLM, and the decision of their next tokens by our own sampler.

A choice is an `engine.sequence.Sequence`, as in our engine: its penalties, bans, biases and random
draws are those of `sampling.sample`, computed from the prompt and all tokens generated so far, on
whatever node they were generated.

Legend: S rows of the batch, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import msgspec
import torch
from torch import Tensor

from ryzanstein.worker.engine.messages import SubmitGroup
from ryzanstein.worker.engine.plan import SequencesFailed, needs_full_logits
from ryzanstein.worker.engine.sequence import Account, SequenceGroup
from ryzanstein.worker.engine.sequence import Sequence as EngineSequence
from ryzanstein.worker.engines.asking import AskedRow
from ryzanstein.worker.sampling.sampler import sample


class BatchRow:
    """One choice. `token_ids` are those that the request came with."""

    def __init__(self, asked: AskedRow, token_ids: Sequence[int]) -> None:
        self._forced = asked.forced
        self._num_taken = 0
        self.sequence = None if asked.group is None else _sequence(asked, asked.group, token_ids)

    @property
    def plain(self) -> bool:
        """Whether vLLM's own greedy choice is what is wanted."""
        return self.sequence is not None and not needs_full_logits(self.sequence.row)

    def take(self, output_ids: Sequence[int]) -> None:
        """Takes the tokens that vLLM has generated for the request so far; it only grows."""
        for token_id in output_ids[self._num_taken :]:
            if token_id < 0:
                break  # not known yet: vLLM runs ahead of its own results
            if self.sequence is not None:
                self.sequence.append(token_id)
            self._num_taken += 1

    @property
    def num_taken(self) -> int:
        """The tokens of the output that were taken."""
        return self._num_taken

    def forced(self) -> int | None:
        """Returns the token that a probe wants next; None: none."""
        return self._forced[self._num_taken] if self._num_taken < len(self._forced) else None


def _sequence(asked: AskedRow, group: SubmitGroup, token_ids: Sequence[int]) -> EngineSequence | None:
    """Returns the choice; None if its prompt is longer than what the request came with: it is left to vLLM."""
    if asked.num_prompt > len(token_ids):
        return None
    generated = [list(token_ids[asked.num_prompt :]) if i == asked.choice else [] for i in range(len(group.generated))]
    # Log probabilities are vLLM's, of the model's own logits.
    sampling = replace(group.sampling, logprobs=None)
    prompt_ids = list(token_ids[: asked.num_prompt])
    message = msgspec.structs.replace(group, prompt_ids=prompt_ids, generated=generated, sampling=sampling)
    return EngineSequence(SequenceGroup(message, 0, 0.0, Account("")), asked.choice)


def decide(logits_SV: Tensor, rows: Mapping[int, BatchRow]) -> dict[int, int]:
    """Leaves one token of each of these rows finite, in place, and returns it: the one that is next.

    Plain rows, and those without finite logits, are left to vLLM. Never raises for what a request or a
    model can cause.
    """
    forced = {s: token for s, row in rows.items() if (token := row.forced()) is not None}
    sequences = {s: row.sequence for s, row in rows.items() if s not in forced and not row.plain and row.sequence is not None}
    tokens = forced | _sampled(logits_SV, sequences)
    if not tokens:
        return {}
    index_R = torch.tensor(list(tokens), device=logits_SV.device)
    token_R = torch.tensor(list(tokens.values()), device=logits_SV.device)
    logits_SV[index_R] = -torch.inf
    logits_SV[index_R, token_R] = 0.0
    return tokens


def _sampled(logits_SV: Tensor, sequences: Mapping[int, EngineSequence]) -> dict[int, int]:
    left = dict(sequences)
    while left:
        index_R = torch.tensor(list(left), device=logits_SV.device)
        try:
            tokens = sample(logits_SV[index_R].float(), [sequence.row for sequence in left.values()])
        except SequencesFailed as failed:
            left = _others(left, failed.rows)
        else:
            return {s: token.token_id for s, token in zip(left, tokens, strict=True)}
    return {}


def _others(sequences: Mapping[int, EngineSequence], failed: Iterable[int]) -> dict[int, EngineSequence]:
    bad = set(failed)
    return {s: sequence for i, (s, sequence) in enumerate(sequences.items()) if i not in bad}
