"""The measurement: rows side by side with the reference, as many at once as memory has room for.

What is finished is saved after every text. A row that fails is left out, and the others go on.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from rich.console import Console

from ryzanstein import errors
from ryzanstein.lab.bench.quality.document import QualityDocument, QualityRow, QualitySettings, WindowSums
from ryzanstein.lab.bench.quality.llama_model import LlamaFailed
from ryzanstein.lab.bench.quality.models import ModelRoom, ScoredModel
from ryzanstein.lab.bench.quality.rows import RowPlan
from ryzanstein.lab.bench.quality.scoring import greedy_answer, greedy_match, judge_window, tokens_at_once
from ryzanstein.lab.bench.quality.texts import ReadText
from ryzanstein.worker.checkpoints.memory import available_bytes
from ryzanstein.worker.refusal import ModelRefused

_SHARE_OF_MEMORY = 0.6
_WARM_UP_TOKENS = 3


@dataclass(frozen=True, slots=True)
class QualityWork:
    """What is read: the texts, and the parts of them that begin the greedy answers and the timed runs."""

    settings: QualitySettings
    texts: Sequence[ReadText]
    vocab_size: int

    @property
    def at_once(self) -> int:
        return tokens_at_once(self.vocab_size)

    @property
    def room(self) -> ModelRoom:
        settings = self.settings
        longest = max(settings.prompt_tokens, settings.prefill_tokens) + settings.new_tokens
        return ModelRoom(max(settings.window, longest), self.at_once, settings.threads)

    def prompts(self) -> list[tuple[int, ...]]:
        return [prompt for text in self.texts for prompt in text.prompts(self.settings.prompts, self.settings.prompt_tokens)]


@dataclass(frozen=True, slots=True, eq=False)
class OpenRow:
    """A row and its model, which is open."""

    row: QualityRow
    model: ScoredModel


class QualityMeasurement:
    """One run. `save` is called when the document has something new."""

    def __init__(
        self, work: QualityWork, document: QualityDocument, people: Console, save: Callable[[QualityDocument], None]
    ) -> None:
        self._work, self._document, self._people, self._save = work, document, people, save
        self._answers: list[list[int]] = []

    def run(self, plans: Sequence[RowPlan]) -> None:
        """Measures what the document lacks.

        Raises FAILED_PRECONDITION if the reference cannot be opened, and INTERNAL if a peer's process
        ends: what is finished is saved by then.
        """
        rows = self._rows(plans)
        left = [(plan, row) for plan, row in zip(plans, rows, strict=True) if not self._is_finished(row)]
        for group in self._groups(plans[0], left):
            self._people.print(f"together: {'; '.join(plan.name for plan, _ in group)}", markup=False)
            with self._opened(plans[0], rows[0]) as reference, ExitStack() as stack:
                others = [self._enter(stack, plan, row) for plan, row in group if row is not rows[0]]
                found = [each for each in others if each is not None]
                try:
                    self._measure(reference, found if self._is_finished(rows[0]) else [reference, *found])
                except LlamaFailed as error:
                    raise errors.internal(f"llama.cpp: {error}") from error

    def _rows(self, plans: Sequence[RowPlan]) -> list[QualityRow]:
        """Returns the document's rows of these plans, and adds those it lacks."""
        known, self._document.failed = self._document.rows, {}
        wanted = [plan.empty() for plan in plans]
        rows = [next((old for old in known if old.is_of(new)), new) for new in wanted]
        self._document.rows = rows
        return rows

    def _is_finished(self, row: QualityRow) -> bool:
        has_texts = all(text.name in row.texts for text in self._work.texts)
        return has_texts and bool(row.greedy) and len(row.decode_s) >= self._work.settings.rounds

    def _groups(
        self, reference: RowPlan, left: Sequence[tuple[RowPlan, QualityRow]]
    ) -> Iterator[list[tuple[RowPlan, QualityRow]]]:
        """Yields rows that fit into memory together, beside the reference."""
        room = self._work.room
        most = available_bytes(torch.device("cpu")) * _SHARE_OF_MEMORY - self._size(reference, room)
        group: list[tuple[RowPlan, QualityRow]] = []
        taken = 0.0
        for plan, row in left:
            size = 0 if plan == reference else self._size(plan, room)
            if group and taken + size > most:
                yield group
                group, taken = [], 0.0
            group.append((plan, row))
            taken += size
        if group:
            yield group

    @staticmethod
    def _size(plan: RowPlan, room: ModelRoom) -> int:
        """Returns 0 for a model that is refused: opening it tells why."""
        try:
            return plan.memory_bytes(room)
        except ModelRefused:
            return 0

    @contextmanager
    def _opened(self, plan: RowPlan, row: QualityRow) -> Iterator[OpenRow]:
        try:
            model = plan.open(self._work.room)
        except ModelRefused as refusal:
            raise errors.failed_precondition("MODEL_INVALID", f"{plan.model}: {refusal}") from refusal
        try:
            yield self._open_row(row, model)
        finally:
            model.close()

    def _enter(self, stack: ExitStack, plan: RowPlan, row: QualityRow) -> OpenRow | None:
        try:
            model = plan.open(self._work.room)
        except (ModelRefused, LlamaFailed) as refusal:
            self._fail(row, str(refusal))
            return None
        stack.callback(model.close)
        if model.vocab_size != self._work.vocab_size:
            self._fail(row, f"has {model.vocab_size} tokens, the reference has {self._work.vocab_size}")
            return None
        return self._open_row(row, model)

    @staticmethod
    def _open_row(row: QualityRow, model: ScoredModel) -> OpenRow:
        row.memory_bytes = model.memory_bytes
        return OpenRow(row, model)

    def _fail(self, row: QualityRow, why: str) -> None:
        """Leaves a row out. Without the reference there is nothing to measure."""
        if row.name == self._document.settings.reference:
            raise errors.failed_precondition("MODEL_INVALID", f"{row.model}: {why}")
        self._people.print(f"{row.name}: {why}", markup=False)
        self._document.failed[row.name] = why
        self._document.rows = [each for each in self._document.rows if each is not row]
        self._save_now()

    def _measure(self, reference: OpenRow, opened: Sequence[OpenRow]) -> None:
        sound = list(opened)
        for text in self._work.texts:
            for each, sums in self._judge(reference, [each for each in sound if text.name not in each.row.texts], text).items():
                if math.isfinite(sum(one.loss + one.divergence for one in sums)):
                    each.row.texts[text.name] = sums
                else:
                    self._fail(each.row, f"text {text.name}: logits are not finite")
                    sound.remove(each)
            self._save_now()
        self._compare_greedy(reference, [each for each in sound if not each.row.greedy])
        self._save_now()
        self._time(sound)
        self._save_now()

    def _judge(self, reference: OpenRow, lacking: Sequence[OpenRow], text: ReadText) -> Mapping[OpenRow, list[WindowSums]]:
        windows = text.windows(self._work.settings.window)
        models = [each.model for each in lacking]
        found: list[list[WindowSums]] = [[] for _ in lacking]
        for number, window in enumerate(windows if lacking else ()):
            self._people.print(f"{text.name}: window {number + 1} of {len(windows)}")
            for sums, one in zip(found, judge_window(reference.model, models, window, self._work.at_once), strict=True):
                sums.append(one)
        return dict(zip(lacking, found, strict=True))

    def _compare_greedy(self, reference: OpenRow, lacking: Sequence[OpenRow]) -> None:
        if not lacking:
            return
        self._people.print("greedy answers")
        prompts, at_once = self._work.prompts(), self._work.at_once
        if not self._answers:
            new_tokens = self._work.settings.new_tokens
            self._answers = [greedy_answer(reference.model, prompt, new_tokens, at_once) for prompt in prompts]
        pairs = list(zip(prompts, self._answers, strict=True))
        for each in lacking:
            each.row.greedy = [greedy_match(each.model, prompt, answer, at_once) for prompt, answer in pairs]

    def _time(self, opened: Sequence[OpenRow]) -> None:
        """Times the rows in turns, after one that is not counted. The order moves on by one each round."""
        settings = self._work.settings
        prompt = self._work.texts[0].beginning(settings.prefill_tokens)
        lacking = [each for each in opened if len(each.row.decode_s) < settings.rounds]
        for each in lacking:
            each.row.prefill_s, each.row.decode_s = [], []
            each.model.time(prompt, _WARM_UP_TOKENS)
        for number in range(settings.rounds):
            self._people.print(f"times: round {number + 1} of {settings.rounds}")
            first = number % max(1, len(lacking))
            for each in (*lacking[first:], *lacking[:first]):
                times = each.model.time(prompt, settings.new_tokens)
                each.row.prefill_s.append(times.prefill_s / len(prompt))
                each.row.decode_s.append(times.decode_s / (settings.new_tokens - 1))

    def _save_now(self) -> None:
        self._document.machine.loads.append(round(os.getloadavg()[0], 2))
        self._save(self._document)
