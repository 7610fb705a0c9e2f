"""The Trainer of transformers with our data, our loss and checkpoints that are complete or not used."""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments

from ryzanstein.tools.atomic import sync
from ryzanstein.tools.finetune.data.batches import Batch, BatchPlan, collated
from ryzanstein.tools.finetune.data.examples import Example
from ryzanstein.tools.finetune.request import Schedule
from ryzanstein.tools.finetune.training.loss import summed_loss
from ryzanstein.worker.refusal import ModelRefused

_COMPLETE = "complete"
_WEIGHTS = "adapter.safetensors"
_EVALUATED_TOKENS = 4096  # of a batch of validation, padding included


class SaveFailed(ModelRefused):
    """Something of a training cannot be written. The last checkpoint is still there."""

    def __init__(self, file: Path, error: Exception) -> None:
        free = shutil.disk_usage(file.parent).free / 1e6
        super().__init__(
            f"{file}: cannot be saved, {free:.1f} MB are free there: the same command goes on from what was saved before "
            f"({error})"
        )


@dataclass(frozen=True, slots=True)
class TrainingMaterial:
    """What is trained on and held out."""

    training: Sequence[Example]
    validation: Sequence[Example]
    plan: BatchPlan


class _Batches(Dataset[dict[str, Tensor]]):
    """All batches of a training, one item each."""

    def __init__(self, material: TrainingMaterial) -> None:
        self._material = material

    def __len__(self) -> int:
        return len(self._material.plan.batches)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return collated(self._material.training, self._material.plan.batches[index])


class AdapterTrainer(Trainer):
    """Trains the adapter of a model of peft."""

    def __init__(
        self, model: Any, material: TrainingMaterial, args: TrainingArguments, callbacks: Sequence[TrainerCallback]
    ) -> None:
        self._batches, self._held = _Batches(material), _held_batches(material.validation)
        self._validation = material.validation
        super().__init__(model=model, args=args, train_dataset=self._batches, callbacks=list(callbacks))
        self.model_accepts_loss_kwargs = True

    def get_train_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        return DataLoader(self._batches, batch_size=1, shuffle=False, collate_fn=_only)

    def compute_loss(
        self, model: Any, inputs: dict[str, Tensor], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Tensor:
        """Returns the mean loss of the tokens that are learned in the whole step."""
        mean: Tensor = summed_loss(model.get_base_model(), inputs) / num_items_in_batch
        return mean

    def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
        """Measures the mean loss of the tokens that are held out."""
        metrics = {"eval_loss": self.held_out_loss()}
        self.log(dict(metrics))
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def held_out_loss(self) -> float:
        adapted: Any = self.model
        model = adapted.get_base_model()
        model.eval()
        total, count = 0.0, 0
        with torch.no_grad():
            for batch in self._held:
                inputs = collated(self._validation, batch)
                total += float(summed_loss(model, inputs))
                count += int((inputs["shift_labels"] >= 0).sum())
        return total / count

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        assert output_dir is not None, "only checkpoints are saved"
        Path(output_dir).mkdir(exist_ok=True)
        save_file(trained(self.model), Path(output_dir) / _WEIGHTS)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        checkpoint = Path(str(self.args.output_dir)) / f"checkpoint-{self.state.global_step}"
        try:
            super()._save_checkpoint(model, trial)
            _complete(checkpoint)
        except (OSError, SafetensorError, RuntimeError) as error:
            raise SaveFailed(checkpoint, error) from error

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        load_trained(self.model, load_file(Path(resume_from_checkpoint) / _WEIGHTS))


def _only(items: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    (item,) = items
    return item


def _held_batches(examples: Sequence[Example]) -> list[Batch]:
    """Returns batches of examples of about one length."""
    batches: list[list[list[int]]] = []
    width = 0
    for index in sorted(range(len(examples)), key=lambda index: -len(examples[index].ids)):
        if not batches or (len(batches[-1]) + 1) * width > _EVALUATED_TOKENS:
            batches.append([])
            width = len(examples[index].ids)
        batches[-1].append([index])
    return list(batches)


def trained(model: Any) -> dict[str, Tensor]:
    """Returns the numbers that are trained, by their names in the model."""
    return {name: each.detach().contiguous() for name, each in model.named_parameters() if each.requires_grad}


def load_trained(model: Any, state: dict[str, Tensor]) -> None:
    """Puts numbers back that `trained` has returned."""
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, tensor in state.items():
            parameters[name].copy_(tensor)


def _complete(checkpoint: Path) -> None:
    for file in checkpoint.iterdir():
        sync(file)
    (checkpoint / _COMPLETE).touch()
    sync(checkpoint)


def last_checkpoint(directory: Path) -> Path | None:
    """Returns the last complete checkpoint, and removes those that are not."""
    found: dict[int, Path] = {}
    for path in directory.glob("checkpoint-*"):
        if (path / _COMPLETE).exists():
            found[int(path.name.partition("-")[2])] = path
        else:
            shutil.rmtree(path)
    return found[max(found)] if found else None


def arguments(schedule: Schedule, directory: Path, num_batches: int) -> TrainingArguments:
    """Returns what the Trainer is told. All epochs are one to it: their batches are decided already."""
    steps = math.ceil(num_batches / schedule.accumulate)
    return TrainingArguments(
        output_dir=str(directory),
        num_train_epochs=1,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=schedule.accumulate,
        learning_rate=schedule.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=math.ceil(schedule.warmup * steps),
        weight_decay=0.0,
        max_grad_norm=schedule.clip,
        logging_strategy="steps",
        logging_steps=1,
        logging_nan_inf_filter=False,
        save_strategy="no",
        save_total_limit=2,
        eval_strategy="no",
        seed=schedule.seed,
        data_seed=schedule.seed,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
        dataloader_num_workers=0,
        dataloader_pin_memory=False,
        label_names=["labels"],
    )
