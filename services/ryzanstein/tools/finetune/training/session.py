"""One training from its first step, or its last checkpoint, to the best adapter."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from safetensors.torch import load_file

from ryzanstein.tools.finetune.request import Schedule, Watching
from ryzanstein.tools.finetune.training.callbacks import ProgressReport, StepWatch, best_of, validations
from ryzanstein.tools.finetune.training.preflight import step_tokens
from ryzanstein.tools.finetune.training.trainer import (
    AdapterTrainer,
    TrainingMaterial,
    arguments,
    last_checkpoint,
    load_trained,
)
from ryzanstein.tools.progress import TrainingProgress

_VALIDATIONS = 5  # of an epoch


class Stopped(Exception):
    """The training was told to stop. It is saved after `step` steps."""

    def __init__(self, step: int, of: int) -> None:
        super().__init__(f"stopped after step {step} of {of}")


@dataclass(frozen=True, slots=True)
class TrainingOutcome:
    """What came out. `steps` are the losses of each step, `validations` of some; `best` is the step that is kept.

    `seconds` and `tokens`, padding included, are of the steps after `resumed_at`.
    """

    steps: list[float]
    validations: list[tuple[int, float]]
    best: int
    seconds: float
    tokens: int
    resumed_at: int


@dataclass(frozen=True, slots=True)
class TrainingSession:
    """Trains `model`, of peft. `directory` keeps the checkpoints; `stopped` is asked after each step."""

    model: Any
    material: TrainingMaterial
    schedule: Schedule
    watching: Watching
    directory: Path
    out: TextIO
    stopped: Callable[[], bool]

    def run(self) -> TrainingOutcome:
        """Trains to the end, and leaves the best adapter in the model. Raises Stopped; ModelRefused."""
        checkpoint = last_checkpoint(self.directory)
        state = _state(checkpoint)
        begun = time.monotonic()
        resumed_at = state["global_step"]
        if resumed_at:
            self.out.write(f"goes on after step {resumed_at} of {self.num_steps}\n")
        if checkpoint is None or not self._is_done(state):
            state = self._train(checkpoint)
        seconds = time.monotonic() - begun
        history = state["log_history"]
        losses = [each["loss"] for each in history if "loss" in each]
        found = validations(history)
        best = best_of(found)
        kept = self._weights(best[0] if best is not None else state["global_step"], best is not None)
        load_trained(self.model, load_file(kept))
        tokens = sum(step_tokens(self.material, self.schedule.accumulate)[resumed_at : len(losses)])
        return TrainingOutcome(losses, found, best[0] if best else state["global_step"], seconds, tokens, resumed_at)

    @property
    def num_steps(self) -> int:
        return math.ceil(len(self.material.plan.batches) / self.schedule.accumulate)

    @property
    def every(self) -> int | None:
        """Steps between validations, None where nothing is held out."""
        if not self.material.validation:
            return None
        return self.watching.every or max(1, math.ceil(self.num_steps / self.schedule.epochs / _VALIDATIONS))

    def _train(self, checkpoint: Path | None) -> dict[str, Any]:
        watch = StepWatch(self.watching, self.directory, self.every, self.stopped)
        report = ProgressReport(TrainingProgress(step_tokens(self.material, self.schedule.accumulate), self.out))
        args = arguments(self.schedule, self.directory, len(self.material.plan.batches))
        trainer = AdapterTrainer(self.model, self.material, args, (watch, report))
        for callback in list(trainer.callback_handler.callbacks):
            if type(callback).__name__ == "PrinterCallback":
                trainer.remove_callback(callback)
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        last = last_checkpoint(self.directory)
        assert last is not None, "the last step is saved"
        state = _state(last)
        if not self._is_done(state):
            raise Stopped(state["global_step"], self.num_steps)
        return state

    def _is_done(self, state: dict[str, Any]) -> bool:
        """Returns whether all steps are done, or validation no longer gets better."""
        found = validations(state["log_history"])
        best = best_of(found)
        worse = 0 if best is None else sum(step > best[0] for step, _ in found)
        return state["global_step"] >= self.num_steps or bool(self.watching.patience and worse >= self.watching.patience)

    def _weights(self, step: int, validated: bool) -> Path:
        if validated:
            return StepWatch(self.watching, self.directory, self.every, self.stopped).best_file(step)
        return self.directory / f"checkpoint-{step}" / "adapter.safetensors"


def _state(checkpoint: Path | None) -> dict[str, Any]:
    if checkpoint is None:
        return {"global_step": 0, "log_history": []}
    state: dict[str, Any] = json.loads((checkpoint / "trainer_state.json").read_text())
    return state
