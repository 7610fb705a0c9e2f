"""Two steps before the first: what a training will take, of memory and of time."""

from __future__ import annotations

import resource
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ryzanstein.tools.finetune.data.batches import collated
from ryzanstein.tools.finetune.training.loss import summed_loss
from ryzanstein.tools.finetune.training.trainer import TrainingMaterial
from ryzanstein.tools.progress import duration
from ryzanstein.worker.checkpoints.memory import available_bytes

_CPU = torch.device("cpu")
_OPTIMIZER_BYTES = 8  # of a number that is trained: AdamW's two moments


@dataclass(frozen=True, slots=True)
class TrainingEstimate:
    """`peak_bytes`: of this process. `available_bytes`: what others leave, and what it has already."""

    num_steps: int
    tokens_per_s: float
    seconds: float
    peak_bytes: int
    available_bytes: int

    def __str__(self) -> str:
        memory = f"{self.peak_bytes / 1e9:.1f} GB of {self.available_bytes / 1e9:.1f} GB memory"
        return f"{self.num_steps} steps at {self.tokens_per_s:.0f} tokens/s: about {duration(self.seconds)}, {memory}"


def step_tokens(material: TrainingMaterial, accumulate: int) -> list[int]:
    """Returns the tokens that each step reads, with padding."""
    batches = [_padded_tokens(material, index) for index in range(len(material.plan.batches))]
    return [sum(batches[first : first + accumulate]) for first in range(0, len(batches), accumulate)]


def _padded_tokens(material: TrainingMaterial, index: int) -> int:
    batch = material.plan.batches[index]
    return len(batch) * max(sum(len(material.training[each].ids) for each in row) for row in batch)


def measured(model: Any, material: TrainingMaterial, accumulate: int) -> TrainingEstimate:
    """Computes the gradients of the largest batch and of one of middle size, and throws them away.

    Validation is not in the time: it reads its tokens three times as fast.
    """
    sizes = [(_padded_tokens(material, index), index) for index in range(len(material.plan.batches))]
    sizes.sort()
    chosen = [sizes[-1][1], sizes[len(sizes) // 2][1]]
    tokens, spent = 0, 0.0
    model.train()
    for index in chosen:
        inputs = collated(material.training, material.plan.batches[index])
        spent += _timed(model, inputs)
        tokens += inputs["input_ids"].numel()
    speed = tokens / spent
    trainable = sum(each.numel() for each in model.parameters() if each.requires_grad)
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    steps = step_tokens(material, accumulate)
    return TrainingEstimate(
        len(steps), speed, sum(steps) / speed, own + _OPTIMIZER_BYTES * trainable, own + available_bytes(_CPU)
    )


def _timed(model: Any, inputs: dict[str, Tensor]) -> float:
    begun = time.perf_counter()
    torch.autograd.backward(summed_loss(model.get_base_model(), inputs))
    model.zero_grad()
    return time.perf_counter() - begun
