"""What a step reads, computes and sends on one rank of so many: counts from the decoder's own shapes, without any weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from ryzanstein import errors
from ryzanstein.worker.model.architectures.spec import DecoderSpec
from ryzanstein.worker.model.collectives.local import LocalCollectives
from ryzanstein.worker.model.decoder import Decoder
from ryzanstein.worker.model.kernels.native import NativeKernels
from ryzanstein.worker.model.kv_cache import slot_width
from ryzanstein.worker.model.parallel import TensorParallel
from ryzanstein.worker.model.products import Product


@dataclass(frozen=True, slots=True)
class Step:
    """`rows` tokens of `sequences` sequences go in; each of those tokens looks at `keys` keys of its sequence."""

    name: str
    rows: int
    sequences: int
    keys: float

    @classmethod
    def decode(cls, batch: int, context: int) -> Self:
        return cls(f"decode-{batch}", batch, batch, context)

    @classmethod
    def prefill(cls, num_tokens: int) -> Self:
        return cls(f"prefill-{num_tokens}", num_tokens, 1, (num_tokens + 1) / 2)


@dataclass(frozen=True, slots=True)
class RankWork:
    """One rank's part of a step. `all_reduce_bytes` is the size of each of its `num_all_reduces`."""

    read_bytes: float
    flops: float
    num_all_reduces: int
    all_reduce_bytes: int
    gather_bytes: int


@dataclass(frozen=True, slots=True)
class DenseModel:
    """A decoder whose every weight works on every token. Bytes of a weight, and of an activation and a cached number."""

    spec: DecoderSpec
    weight_bytes: float
    activation_bytes: int

    def __post_init__(self) -> None:
        """Raises INVALID_ARGUMENT for experts or latents, whose reads depend on more than shapes."""
        if self.spec.latent is not None or any(layer.experts for layer in self.spec.layers):
            raise errors.invalid("model", "must be dense: no mixture of experts, no latent attention", self.spec.model_type)

    def work(self, step: Step, num_ranks: int) -> RankWork:
        """Of rank 0. Weights are read once a step, keys and values once a sequence. Raises UnevenSplit."""
        spec, tp = self.spec, TensorParallel(0, num_ranks, LocalCollectives())
        total, head = _product_weights(spec, tp)
        slots = step.sequences * step.keys * slot_width(spec, tp) * spec.num_layers
        heads = tp.heads(spec.num_heads, spec.num_kv_heads).num_heads
        attended = step.rows * step.keys * heads * spec.head_dim * spec.num_layers
        return RankWork(
            total * self.weight_bytes + slots * self.activation_bytes,
            2 * (total - head) * step.rows + 2 * head * step.sequences + 4 * attended,
            1 + spec.num_layers * (1 if spec.parallel else 2),
            step.rows * spec.hidden_size * self.activation_bytes,
            step.sequences * 2 * torch.float64.itemsize,
        )


def _product_weights(spec: DecoderSpec, tp: TensorParallel) -> tuple[int, int]:
    """Numbers in the weights that this rank multiplies by, and how many of them are the head's."""
    count = _Count()
    Decoder(count, tp, spec)
    return sum(count.sizes), count.sizes[-1]


class _Count:
    """A WeightSource that takes down the sizes of products, in the order of the decoder: the head comes last."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.kernels: NativeKernels | None = None

    def new(self, *shape: int) -> Tensor:
        return torch.empty(shape, device="meta")

    def read(self, name: str, shape: tuple[int, ...], out: Tensor, dim: int = 0, start: int = 0) -> None:
        pass

    def product(self, weight_OI: Tensor, bias_O: Tensor | None, *, kept: bool = False) -> Product:
        self.sizes.append(weight_OI.numel())
        return lambda x_TI: x_TI
