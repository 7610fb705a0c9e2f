"""Whether examples can share a row: where a model is told apart by positions what belongs together."""

from __future__ import annotations

from typing import Any

import torch

from ryzanstein.tools.finetune.data.batches import collated
from ryzanstein.tools.finetune.training.loss import summed_loss
from ryzanstein.tools.finetune.training.trainer import TrainingMaterial
from ryzanstein.worker.architectures.spec import DecoderSpec
from ryzanstein.worker.refusal import ModelRefused

_TOLERANCE = 1e-4


def refuse_unpackable(model: Any, spec: DecoderSpec, material: TrainingMaterial) -> None:
    """Raises ModelRefused if an example's loss depends on what else is in its row.

    It is measured: the first row with several examples has the loss of these examples apart, or not.
    """
    if spec.states:
        raise ModelRefused(f"--packing: model_type {spec.model_type} has states, which go on from one example to the next")
    rows = (row for batch in material.plan.batches for row in batch if len(row) > 1)
    row = next(rows, None)
    if row is None:
        return
    base = model.get_base_model()
    base.eval()
    with torch.no_grad():
        packed = float(summed_loss(base, collated(material.training, [row])))
        apart = sum(float(summed_loss(base, collated(material.training, [[index]]))) for index in row)
    if not abs(packed - apart) <= _TOLERANCE * abs(apart):
        raise ModelRefused(
            f"--packing: examples of one row see each other in a model_type {spec.model_type} of transformers: their loss is "
            f"{packed:.4f}, apart it is {apart:.4f}"
        )
