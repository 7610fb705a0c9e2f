"""What a step reads, computes and sends on one of several ranks.

The counts come from the decoder's shapes, without any weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from ryzanstein import errors
from ryzanstein.worker.architectures.spec import DecoderSpec
from ryzanstein.worker.cache.sizes import slot_width
from ryzanstein.worker.collectives.local import LocalCollectives
from ryzanstein.worker.collectives.parallel import TensorParallel
from ryzanstein.worker.kernels.native import NativeKernels
from ryzanstein.worker.model.decoder import Decoder
from ryzanstein.worker.products import Product
from ryzanstein.worker.products.adapted import AdapterSites
from ryzanstein.worker.products.blocks import Blocks, PackedBlocks
from ryzanstein.worker.products.int8 import FillRows, Int8Table


@dataclass(frozen=True, slots=True)
class Step:
    """A step with `rows` tokens of `sequences` sequences.

    Each token attends to `keys` keys of its sequence.
    """

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
    """One rank's part of a step.

    `all_reduce_bytes` is the size of each of its `num_all_reduces`.
    """

    read_bytes: float
    flops: float
    num_all_reduces: int
    all_reduce_bytes: int
    gather_bytes: int


@dataclass(frozen=True, slots=True)
class DenseModel:
    """A decoder whose every weight works on every token.

    `weight_bytes` is the size of a weight, `activation_bytes` that of an activation and a cached
    number.
    """

    spec: DecoderSpec
    weight_bytes: float
    activation_bytes: int

    def __post_init__(self) -> None:
        """Raises INVALID_ARGUMENT for experts or latents.

        Their reads depend on more than shapes.
        """
        if self.spec.latent is not None or any(layer.experts for layer in self.spec.layers):
            raise errors.invalid("model", "must be dense: no mixture of experts, no latent attention", self.spec.model_type)

    def work(self, step: Step, num_ranks: int) -> RankWork:
        """Returns the work of rank 0. Raises UnevenSplit.

        Weights are read once per step, keys and values once per sequence.
        """
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
    """Returns how many numbers this rank's product weights have, and how many are the head's."""
    count = _Count()
    Decoder(count, tp, spec)
    return sum(count.sizes), count.sizes[-1]


class _Count:
    """A WeightSource that records the sizes of products.

    They are in the decoder's order: the head comes last.
    """

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.kernels: NativeKernels | None = None
        self.adapters = AdapterSites()

    def new(self, *shape: int) -> Tensor:
        return torch.empty(shape, device="meta")

    def read(self, name: str, shape: tuple[int, ...], out: Tensor, dim: int = 0, start: int = 0) -> None:
        pass

    def blocks(self, name: str, shape: tuple[int, ...]) -> Blocks | None:
        return None

    def packed(self, parts: Sequence[Blocks], num_outputs: int) -> PackedBlocks:
        raise AssertionError("there are no blocks")

    def table(self, shape: tuple[int, int], fill: FillRows) -> Int8Table | None:
        return None

    def product(self, weight_OI: Tensor, bias_O: Tensor | None, *, kept: bool = False) -> Product:
        self.sizes.append(weight_OI.numel())
        return lambda x_TI: x_TI
