"""The size of a KV cache, from the description of a decoder. It imports no torch.

Ranks allocate by it, and the agent knows the size before it starts them.
"""

from __future__ import annotations

from ryzanstein.worker.engine.extents import Extents
from ryzanstein.worker.model.architectures.spec import DecoderSpec
from ryzanstein.worker.model.layer_groups import layer_groups
from ryzanstein.worker.model.parallel import TensorParallel
from ryzanstein.worker.model.refusal import ModelRefused

DEFAULT_KV_BYTES = 1 << 30


def slot_width(spec: DecoderSpec, tp: TensorParallel) -> int:
    """Returns the number of columns of a slot on this rank."""
    num_parts = 2 if spec.latent is None else 1
    return num_parts * tp.heads(spec.num_heads, spec.num_kv_heads).num_kv_heads * spec.head_dim


def bytes_of_block(spec: DecoderSpec, tp: TensorParallel, block_size: int, item_bytes: int) -> int:
    """Returns the size of one block, over the layers of a group, on this rank.

    Every rank has the same number of heads, so all ranks get the same result.
    """
    return layer_groups(spec).num_planes * block_size * slot_width(spec, tp) * item_bytes


def blocks_in(budget_bytes: int, bytes_per_block: int) -> int:
    """Returns how many blocks fit the budget of one rank. Raises ModelRefused if none fits."""
    num_blocks = budget_bytes // bytes_per_block
    if num_blocks < 1:
        raise ModelRefused(f"a KV cache of {budget_bytes} bytes per rank is smaller than one block of {bytes_per_block} bytes")
    return num_blocks


def extents_of(spec: DecoderSpec, block_size: int, token_budget: int) -> Extents:
    """Returns how many blocks the sequences of a decoder hold."""
    return Extents(layer_groups(spec).windows, block_size, token_budget)


def default_blocks(extents: Extents, context_length: int, max_sequences: int, bytes_per_block: int) -> int:
    """Returns the blocks with which every sequence can be as long as the context, up to 1 GiB."""
    return min(max_sequences * extents.blocks_for(context_length), blocks_in(DEFAULT_KV_BYTES, bytes_per_block))
