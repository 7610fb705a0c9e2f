"""What layers without keys and values, or beside them, keep of each sequence: a state of fixed size.

A *slot* holds the state of all such layers after some number of a sequence's tokens. The engine decides
which slots a step reads and writes (see `engine.memory.states`). Numbers are float32 whatever the
model's dtype: a state is added to at every token, and rounding would add up.

Legend: N slots, W numbers of a slot in one layer, L tokens that a convolution sees, F its channels of
this rank, H heads of this rank, K rows and V columns of a head's matrix.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ryzanstein.worker.architectures.spec import DecoderSpec
from ryzanstein.worker.cache.kv_cache import zeros
from ryzanstein.worker.cache.state_sizes import SlotShape, slot_shape
from ryzanstein.worker.collectives.parallel import TensorParallel

_SPARE = 2  # slots behind those of the engine: one of zeros, one for what nobody reads


@dataclass(frozen=True, slots=True)
class LayerStates:
    """The slots of one layer, [N, W]. A slot begins with the last L - 1 tokens' channels; the heads' matrices follow."""

    slots_NW: Tensor
    shape: SlotShape

    @property
    def tails_NLF(self) -> Tensor:
        """The channels of the last tokens, the farthest first, [N, L - 1, F]."""
        shape = self.shape
        return self.slots_NW[:, : shape.num_tails].view(len(self.slots_NW), shape.length - 1, shape.num_channels)

    @property
    def matrices_NHKV(self) -> Tensor:
        shape = self.shape
        return self.slots_NW[:, shape.num_tails :].view(-1, shape.num_heads, shape.rows, shape.columns)


class StateCache:
    """The slots of one rank. After those of the engine comes one that is always zero, and one that is never read."""

    def __init__(self, spec: DecoderSpec, tp: TensorParallel, num_slots: int, device: torch.device) -> None:
        self.num_slots = num_slots
        self._layers: dict[int, LayerStates] = {}
        for index, layer in enumerate(spec.layers):
            if layer.state is not None:
                shape = slot_shape(layer.state, tp)
                slots_NW, _ = zeros((num_slots + _SPARE, shape.num_numbers), torch.float32, device)
                self._layers[index] = LayerStates(slots_NW, shape)

    def layer(self, index: int) -> LayerStates:
        """Returns the slots of a layer that keeps a state."""
        return self._layers[index]


def zero_slot(num_slots: int) -> int:
    """Returns the slot that a sequence begins with."""
    return num_slots


def unread_slot(num_slots: int) -> int:
    """Returns the slot for a state that nobody reads."""
    return num_slots + 1
