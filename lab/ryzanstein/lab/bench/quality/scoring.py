"""Two models side by side: what a text's tokens cost each, and how far their distributions differ.

Both read the same few tokens, their logits become a few sums, and so on: the logits of a whole
window would take gigabytes, and to keep only a distribution's largest part would not be its
divergence.

Legend: T tokens, V vocabulary, R rows at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ryzanstein.lab.bench.quality.document import GreedyMatch, WindowSums
from ryzanstein.lab.bench.quality.models import ScoredModel
from ryzanstein.lab.bench.quality.texts import TextWindow

_CACHED_NUMBERS = 2**20  # of each operand, so that the processor's caches hold them between two passes
_CALL_NUMBERS = 2**24


def tokens_at_once(vocab_size: int) -> int:
    """Returns how many tokens a model reads in a call: their logits take 64 MB at most."""
    return max(16, min(256, _CALL_NUMBERS // vocab_size))


class Judged:
    """The sums of one model over a window."""

    def __init__(self) -> None:
        self._loss, self._divergence, self._same, self._count = 0.0, 0.0, 0, 0

    def add(self, expected_TV: Tensor, found_TV: Tensor, targets_T: Tensor) -> None:
        """Adds tokens: the reference's logits and the model's for them."""
        rows = max(1, _CACHED_NUMBERS // found_TV.shape[1])
        for start in range(0, len(targets_T), rows):
            part = slice(start, start + rows)
            self._add(expected_TV[part], found_TV[part], targets_T[part])

    def _add(self, expected_RV: Tensor, found_RV: Tensor, targets_R: Tensor) -> None:
        """The divergence of p from q is the sum of p log(p / q) - p + q.

        As both sum to 1 the last two change nothing, but for rounding: so an error of a logarithm of
        all, common to a row, cancels, and equal rows give 0.
        """
        log_p_RV = expected_RV - expected_RV.logsumexp(1, keepdim=True)
        log_q_RV = found_RV - found_RV.logsumexp(1, keepdim=True)
        self._loss -= float(log_q_RV.gather(1, targets_R.unsqueeze(1)).double().sum())
        apart_RV = log_p_RV - log_q_RV
        p_RV, q_RV = log_p_RV.exp_(), log_q_RV.exp_()
        self._divergence += float(apart_RV.mul_(p_RV).sub_(p_RV).add_(q_RV).sum(1).double().sum())
        self._same += int((expected_RV.argmax(1) == found_RV.argmax(1)).sum())
        self._count += len(targets_R)

    def sums(self) -> WindowSums:
        return WindowSums(self._count, self._loss, self._divergence, self._same)


@torch.inference_mode()
def judge_window(reference: ScoredModel, models: Sequence[ScoredModel], window: TextWindow, at_once: int) -> list[WindowSums]:
    """Returns the sums of each model. The reference may be one of them: it reads the window once."""
    judged = [Judged() for _ in models]
    for model in {id(model): model for model in (reference, *models)}.values():
        model.restart()
    for start in range(0, max(window.scored), at_once):
        ids = window.ids[start : min(start + at_once, max(window.scored))]
        rows = _rows(window, start, len(ids))
        targets_T = torch.tensor(window.ids[start + 1 : start + 1 + len(ids)])[rows]
        expected_TV = reference.advance(ids)[rows]
        for model, sums in zip(models, judged, strict=True):
            found_TV = expected_TV if model is reference else model.advance(ids)[rows]
            sums.add(expected_TV, found_TV, targets_T)
    return [sums.sums() for sums in judged]


def _rows(window: TextWindow, start: int, count: int) -> slice | list[int]:
    """Returns the rows of a call whose next token is scored. A slice costs no copy of logits."""
    rows = [place - 1 - start for place in window.scored if start < place <= start + count]
    return slice(rows[0], rows[-1] + 1) if rows and rows[-1] - rows[0] == len(rows) - 1 else rows


@torch.inference_mode()
def greedy_answer(model: ScoredModel, prompt_ids: Sequence[int], new_tokens: int, at_once: int) -> list[int]:
    """Returns the likeliest tokens after a prompt, one after another."""
    logits_V = _read(model, prompt_ids, at_once)
    answer = [int(logits_V.argmax())]
    while len(answer) < new_tokens:
        answer.append(int(model.advance(answer[-1:])[0].argmax()))
    return answer


@torch.inference_mode()
def greedy_match(model: ScoredModel, prompt_ids: Sequence[int], answer: Sequence[int], at_once: int) -> GreedyMatch:
    """Compares a model's likeliest tokens with the reference's answer, which the model reads.

    Up to the first difference it has read what it would have written itself: the length of the equal
    beginning is that of its own greedy answer.
    """
    found = [int(_read(model, prompt_ids, at_once).argmax())]
    for start in range(0, len(answer) - 1, at_once):
        found += model.advance(answer[start : min(start + at_once, len(answer) - 1)]).argmax(1).tolist()
    equal = [a == b for a, b in zip(found, answer, strict=True)]
    return GreedyMatch(([*equal, False]).index(False), sum(equal))


def _read(model: ScoredModel, prompt_ids: Sequence[int], at_once: int) -> Tensor:
    """Returns the logits after a prompt, [V]."""
    model.restart()
    for start in range(0, len(prompt_ids), at_once):
        logits_TV = model.advance(prompt_ids[start : start + at_once])
    return logits_TV[-1]
