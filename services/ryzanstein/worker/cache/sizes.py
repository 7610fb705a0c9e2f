"""The size of a KV cache, from the description of a decoder. It imports no torch.

Ranks allocate by it, and the agent knows the size before it starts them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ryzanstein.worker.architectures.layer_heads import HeadsSpec
from ryzanstein.worker.architectures.spec import DecoderSpec
from ryzanstein.worker.cache.layer_groups import layer_groups
from ryzanstein.worker.cache.state_sizes import state_bytes
from ryzanstein.worker.cache.zones import Zones
from ryzanstein.worker.collectives.parallel import TensorParallel
from ryzanstein.worker.engine.extents import SLOTS_OF_SEQUENCE, Extents
from ryzanstein.worker.refusal import ModelRefused

DEFAULT_KV_BYTES = 1 << 30
# The part of the budget for hot pages of conversations that do not run: without them, their
# compressed pages are of no use.
_TAILS = 0.05
_BOUND_BYTES = 4
_STATES = 0.5  # the part of the budget for states
_RUNNING = 8  # sequences whose states do not count where no budget is set: with few, a node serves hardly anybody


@dataclass(frozen=True, slots=True)
class CacheRequest:
    """What is asked for: pages for all layers, or bytes for each rank; without both, a default.

    `num_states` are slots for states; None: as many as running sequences want, up to half of the bytes,
    but by default at least those of `_RUNNING` sequences.
    A number takes `item_bytes`. At most `max_sequences` run, a step feeds `token_budget` tokens.
    """

    num_pages: int | None
    kv_bytes: int | None
    block_size: int
    max_sequences: int
    token_budget: int
    item_bytes: int
    zones: Zones | None = None
    num_states: int | None = None


@dataclass(frozen=True, slots=True)
class CacheSize:
    """The size of the cache of the rank with the most heads. Every rank has as many blocks."""

    num_blocks: int
    block_bytes: int
    hot_pages: int
    hot_page_bytes: int
    extents: Extents
    num_states: int = 0
    state_bytes: int = 0
    """The size of a slot for the state of all layers that keep one."""

    @property
    def max_sequences(self) -> int | None:
        """How many sequences may run for which there are slots; None: none is needed."""
        return self.num_states // SLOTS_OF_SEQUENCE if self.state_bytes else None

    @property
    def hot_bytes(self) -> int:
        return self.hot_pages * self.hot_page_bytes

    def bytes_for(self, num_tokens: int) -> int:
        """Returns a budget with room for one sequence of so many tokens."""
        least_bytes = self.extents.blocks_for(num_tokens) * self.block_bytes + SLOTS_OF_SEQUENCE * self.state_bytes
        if not self.hot_pages:
            return least_bytes
        # Hot pages for what does not run take their part of the budget.
        return math.ceil((least_bytes + self.hot_bytes) / (1 - _TAILS))

    @property
    def nbytes(self) -> int:
        return self.num_blocks * self.block_bytes + self.hot_bytes + self.num_states * self.state_bytes


def slot_width(spec: DecoderSpec, tp: TensorParallel) -> int:
    """Returns the number of columns of a slot on this rank: enough for every layer's keys and values in its planes."""
    if spec.has_own_heads:
        return max(_own_width(spec, layer.heads, tp) for layer in spec.layers)
    num_parts = 2 if spec.latent is None else 1
    share = tp.heads(spec.num_heads, spec.num_kv_heads, apart=spec.heads_apart)
    return num_parts * share.num_kv_heads * spec.head_dim


def _own_width(spec: DecoderSpec, heads: HeadsSpec | None, tp: TensorParallel) -> int:
    heads = heads or HeadsSpec(spec.num_kv_heads, spec.head_dim)
    own = tp.heads(spec.num_heads, heads.num_kv_heads).num_kv_heads * heads.head_dim
    return 2 * own if heads.planes == 1 else own


def bytes_of_block(spec: DecoderSpec, tp: TensorParallel, block_size: int, item_bytes: int, zones: Zones | None = None) -> int:
    """Returns the size of one block, over the layers of a group, on this rank."""
    groups, width = layer_groups(spec), slot_width(spec, tp)
    plane_bytes = block_size * width * item_bytes if zones is None else zones.layout.block_bytes
    # The least and the greatest of its keys, as float32.
    bounds_bytes = width * _BOUND_BYTES if groups.selects else 0
    return groups.num_planes * (plane_bytes + bounds_bytes)


def extents_of(spec: DecoderSpec, block_size: int, token_budget: int, zones: Zones | None = None) -> Extents:
    """Returns how many blocks the sequences of a decoder hold."""
    groups, hot_tokens = layer_groups(spec), None if zones is None else zones.hot_tokens
    return Extents(groups.windows, block_size, token_budget, hot_tokens, groups.lasting)


def cache_size(spec: DecoderSpec, tp: TensorParallel, request: CacheRequest) -> CacheSize:
    """Returns the size of the largest cache of a rank. Raises ModelRefused if not one page of all layers fits.

    By default every sequence can be as long as the context, up to 1 GiB. Zones are those of that rank.
    """
    zones, size, tp = request.zones, request.block_size, tp.widest
    extents = extents_of(spec, size, request.token_budget, zones)
    block_bytes = bytes_of_block(spec, tp, size, request.item_bytes, zones)
    num_blocks = None if request.num_pages is None else request.num_pages * len(extents.windows)
    slot_bytes = state_bytes(spec, tp)
    num_states = _num_states(request, slot_bytes) if slot_bytes else 0
    budget = (request.kv_bytes or DEFAULT_KV_BYTES) - num_states * slot_bytes
    if request.kv_bytes is None:
        budget = max(budget, int((1 - _STATES) * DEFAULT_KV_BYTES))
    if num_blocks is not None:
        budget = num_blocks * block_bytes
    hot_page_bytes = 0 if zones is None else spec.num_layers * size * slot_width(spec, tp) * request.item_bytes
    least = 0 if zones is None else extents.hot_pages_for(request.max_sequences)
    hot_pages = 0 if zones is None else least + int(_TAILS * budget) // hot_page_bytes
    if num_blocks is None:
        num_blocks = blocks_in(budget, block_bytes, hot_pages * hot_page_bytes, len(extents.windows))
        if request.kv_bytes is None:
            num_blocks = min(num_blocks, request.max_sequences * extents.blocks_for(spec.context_length))
    return CacheSize(num_blocks, block_bytes, hot_pages, hot_page_bytes, extents, num_states, slot_bytes)


def _num_states(request: CacheRequest, slot_bytes: int) -> int:
    """Returns how many slots for states there are. Raises ModelRefused if not one sequence could run."""
    least, wanted = SLOTS_OF_SEQUENCE, SLOTS_OF_SEQUENCE * request.max_sequences
    if request.num_states is not None:
        if request.num_states < least:
            slots = f"{request.num_states} slots for states (tuning.kv_states)"
            raise ModelRefused(f"{slots} must be at least {least}: a sequence that runs needs as many")
        return request.num_states
    budget = request.kv_bytes or DEFAULT_KV_BYTES
    found = min(wanted, int(_STATES * budget) // slot_bytes)
    if request.kv_bytes is None:
        return max(found, min(wanted, SLOTS_OF_SEQUENCE * _RUNNING))
    if found < least:
        raise ModelRefused(
            f"a cache of {budget} bytes per rank has {int(_STATES * budget)} for states of {slot_bytes} bytes, and a sequence "
            f"needs {least}: kv_bytes must be at least {math.ceil(least * slot_bytes / _STATES)}, or tuning.kv_states set"
        )
    return found


def blocks_in(budget_bytes: int, block_bytes: int, hot_bytes: int = 0, least: int = 1) -> int:
    """Returns how many blocks fit the budget of one rank beside hot pages.

    Raises ModelRefused if fewer than `least` fit: one for each group of layers.
    """
    num_blocks = (budget_bytes - hot_bytes) // block_bytes
    if num_blocks < least:
        excluding = f" beside {hot_bytes} for hot pages; fewer max_sequences or kv_hot_tokens need less" if hot_bytes else ""
        needed = "one block" if least == 1 else f"{least} blocks"
        each = "" if least == 1 else ", one for each group of layers"
        raise ModelRefused(
            f"a KV cache of {budget_bytes} bytes per rank is smaller than {needed} of {block_bytes} bytes{each}{excluding}"
        )
    return num_blocks
