"""What happens between steps: saving, validation, stopping, and a line for people."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from transformers import TrainerCallback

from ryzanstein.tools.finetune.refusal import Diverged
from ryzanstein.tools.finetune.request import Watching
from ryzanstein.tools.finetune.training.trainer import SaveFailed, trained
from ryzanstein.tools.progress import TrainingProgress

_BEST = "best-{step}.safetensors"
_LEAST_BETTER = 1e-4  # relative


def validations(history: list[dict[str, float]]) -> list[tuple[int, float]]:
    """Returns the step and the loss of each validation."""
    return [(int(each["step"]), each["eval_loss"]) for each in history if "eval_loss" in each]


def best_of(found: list[tuple[int, float]]) -> tuple[int, float] | None:
    """Returns the first validation than which none is clearly better."""
    best: tuple[int, float] | None = None
    for step, loss in found:
        if best is None or loss < best[1] * (1 - _LEAST_BETTER):
            best = step, loss
    return best


class StepWatch(TrainerCallback):
    """Decides after each step whether to validate, to save and to stop.

    All of it follows from the step, the history in the checkpoint and the clock; only saving, which changes
    nothing, depends on the clock.
    """

    def __init__(self, watching: Watching, directory: Path, every: int | None, stopped: Callable[[], bool]) -> None:
        self._watching, self._directory, self._every, self._stopped = watching, directory, every, stopped
        self._saved_at = time.monotonic()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        last = state.global_step >= state.max_steps
        if self._every is not None and (state.global_step % self._every == 0 or last):
            control.should_evaluate = True
        due = time.monotonic() - self._saved_at >= self._watching.save_every_s
        control.should_save = due or last or self._stopped()
        if self._stopped():
            control.should_training_stop = True

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, float] | None = None, **_: Any) -> None:
        loss = (logs or {}).get("loss")
        if loss is not None and not math.isfinite(loss):
            raise Diverged(f"step {state.global_step}: the loss is {loss}: a lower --learning-rate may help")

    def on_evaluate(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        found = validations(state.log_history)
        best = best_of(found)
        assert best is not None, "this validation is one"
        if best[0] == state.global_step:
            try:
                save_file(trained(model), self.best_file(best[0]))
            except (OSError, SafetensorError) as error:
                raise SaveFailed(self.best_file(best[0]), error) from error
        worse = sum(step > best[0] for step, _ in found)
        if self._watching.patience and worse >= self._watching.patience:
            control.should_training_stop = control.should_save = True

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._saved_at = time.monotonic()
        best = best_of(validations(state.log_history))
        for file in self._directory.glob(_BEST.format(step="*")):
            if best is None or file != self.best_file(best[0]):
                file.unlink()

    def best_file(self, step: int) -> Path:
        """The file with the adapter of a step."""
        return self._directory / _BEST.format(step=step)


class ProgressReport(TrainerCallback):
    """Tells how far it is."""

    def __init__(self, progress: TrainingProgress) -> None:
        self._progress = progress

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, float] | None = None, **_: Any) -> None:
        given = logs or {}
        if "loss" in given:
            self._progress.step(state.global_step, given["loss"], given["learning_rate"])
        if "eval_loss" in given:
            self._progress.validated(state.global_step, given["eval_loss"])
