"""What the layers of a decoder read of a step besides their weights and the cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ryzanstein.worker.cache.kv_cache import bound_blocks
from ryzanstein.worker.kernels.functions.attention import AttentionFunctions
from ryzanstein.worker.kernels.functions.cold_layout import ColdLayout
from ryzanstein.worker.model.attention import Segment
from ryzanstein.worker.model.inputs.states.inputs import StateInputs
from ryzanstein.worker.products.adapted import AdapterRows


@dataclass(frozen=True, slots=True)
class Sealing:
    """Hot pages that are full, and the blocks into which a group's layers compress them."""

    kernels: AttentionFunctions
    layout: ColdLayout
    hot_M: Tensor
    cold_M: Tensor

    def run(self, slots_NC: Tensor, cold_BX: Tensor) -> None:
        """Compresses the pages of one layer."""
        self.kernels.seal(slots_NC, self.hot_M, cold_BX, self.cold_M, self.layout)


@dataclass(frozen=True, slots=True)
class Bounding:
    """Blocks that are full now, and of which the least and the greatest keys are kept: see `KVCache`."""

    blocks_M: Tensor
    block_size: int

    def run(self, slots_NC: Tensor, bounds_B2Y: Tensor) -> None:
        """Finds them in one layer."""
        bound_blocks(slots_NC, bounds_B2Y, self.blocks_M, self.block_size)


@dataclass(frozen=True, slots=True)
class GroupInputs:
    """What the layers of a group read: where new keys and values go, and which ones are seen.

    `sealing` and `bounding` are what is to be compressed, or bounded, in between, if anything. For
    short convolutions `taps_LT` are the slots of the tokens before each one, the farthest first.
    """

    slots_T: Tensor
    segments: Sequence[Segment]
    sealing: Sealing | None = None
    bounding: Bounding | None = None
    taps_LT: Tensor | None = None


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The tensors that the layers read.

    `groups` are those of the layers; layers that keep a state read `states`.
    `last_R` are the rows of T whose logits are needed: those of
    sampled sequences, then those that score prompts. The last ones are those whose hidden states are
    wanted themselves. `adapters` are the rows of T that have an adapter, `last_adapters` those of `last_R`.
    """

    ids_T: Tensor
    positions_T: Tensor
    last_R: Tensor
    groups: Sequence[GroupInputs]
    states: StateInputs | None = None
    adapters: AdapterRows | None = None
    last_adapters: AdapterRows | None = None
