"""An engine without ranks: in each step it draws one token of every running choice from the scripted model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from ryzanstein.cluster import Load
from ryzanstein.generation.tokens import FinishReason
from ryzanstein.lab.simulation.scripted.model import ROOT, ScriptedModel, extended
from ryzanstein.worker.engine.messages import CancelGroup, ChoiceEnd, EngineStats, FinishChoice, StepEvents, SubmitGroup

_NO_STATS = EngineStats(0, 0, 0, 0, 0, 0, 0, 0, 0)


@dataclass(slots=True)
class _Drawn:
    """A choice that runs, with the digest of all its tokens so far and the number of the next one."""

    submit: SubmitGroup
    choice: int
    digest: int
    index: int


class WideEngine:
    """Takes the agent's messages, and calls `on_step` with the events of each step. Idle, it has no timer."""

    def __init__(self, model: ScriptedModel, step_s: float, max_sequences: int, on_step: Callable[[StepEvents], None]) -> None:
        self._model, self._step_s, self._max_sequences = model, step_s, max_sequences
        self._on_step = on_step
        self._choices: dict[tuple[int, int], _Drawn] = {}
        self._new: list[int] = []
        self._timer: asyncio.TimerHandle | None = None
        self.step = 0

    @property
    def load(self) -> Load:
        return Load(len(self._choices), 0, self._max_sequences, len(self._choices), 4096)

    def send(self, message: SubmitGroup | CancelGroup | FinishChoice) -> None:
        """Takes a message of the agent."""
        match message:
            case SubmitGroup():
                self._begin(message)
            case FinishChoice(group, choice):
                self._choices.pop((group, choice), None)
            case CancelGroup(group):
                for key in [key for key in self._choices if key[0] == group]:
                    del self._choices[key]

    def close(self) -> None:
        """Forgets everything that runs."""
        self._choices.clear()

    def _begin(self, submit: SubmitGroup) -> None:
        digest = ROOT
        for token_id in submit.prompt_ids:
            digest = extended(digest, token_id)
        for choice, known in enumerate(submit.generated):
            if not submit.finished[choice]:
                so_far = digest
                for token_id in known:
                    so_far = extended(so_far, token_id)
                self._choices[submit.group, choice] = _Drawn(submit, choice, so_far, len(known))
        self._new.append(submit.group)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._step_s, self._take_step)

    def _take_step(self) -> None:
        self._timer = None
        self.step += 1
        accepted, self._new = self._new, []
        groups, choices, token_ids, ended = list[int](), list[int](), list[int](), list[ChoiceEnd]()
        for key, drawn in list(self._choices.items()):
            token_id, last = self._draw(drawn)
            groups.append(key[0])
            choices.append(key[1])
            token_ids.append(token_id)
            if last is not None:
                del self._choices[key]
                ended.append(ChoiceEnd(*key, int(last), 0))
        if self._choices:
            self._timer = asyncio.get_running_loop().call_later(self._step_s, self._take_step)
        self._on_step(
            StepEvents(self.step, groups, choices, token_ids, {}, ended, [], _NO_STATS, self._step_s, accepted=accepted)
        )

    def _draw(self, drawn: _Drawn) -> tuple[int, FinishReason | None]:
        """Returns the next token, and why it is the last one; None: it is not."""
        submit = drawn.submit
        stops = submit.stop_token_ids if drawn.index < submit.sampling.min_tokens else ()
        token_id = self._model.draw(drawn.digest, submit.sampling, drawn.choice, drawn.index, stops).token_id
        drawn.digest, drawn.index = extended(drawn.digest, token_id), drawn.index + 1
        if token_id in submit.stop_token_ids and drawn.index > submit.sampling.min_tokens:
            return token_id, FinishReason.STOP
        return token_id, FinishReason.LENGTH if drawn.index >= submit.max_tokens else None
