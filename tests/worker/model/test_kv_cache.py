"""Ranks cache only their own heads: the same memory per rank holds the context as often as there are ranks."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ryzanstein.worker.architectures.registry import spec_of
from ryzanstein.worker.cache.kv_cache import KVCache
from ryzanstein.worker.cache.sizes import CacheRequest, blocks_in, bytes_of_block, cache_size, slot_width
from ryzanstein.worker.cache.zones import zones_of
from ryzanstein.worker.collectives.local import LocalCollectives
from ryzanstein.worker.collectives.parallel import TensorParallel
from ryzanstein.worker.model.runner import ModelRunner
from ryzanstein.worker.refusal import ModelRefused
from ryzanstein.worker.settings.options import RunnerOptions
from ryzanstein.worker.settings.quantization import KvCompression

LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
}
DEEPSEEK = LLAMA | {
    "model_type": "deepseek_v2",
    "num_key_value_heads": 32,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 64,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1408,
}
BLOCK_SIZE = 16
MIB = 2**20
LARGE_PAGE = 2 * MIB


def tensor_parallel(size: int, rank: int = 0) -> TensorParallel:
    return TensorParallel(rank, size, LocalCollectives())


def bytes_of_a_block(config: dict[str, Any], size: int) -> int:
    return bytes_of_block(spec_of(config), tensor_parallel(size), BLOCK_SIZE, torch.bfloat16.itemsize)


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_a_block_takes_each_rank_its_share_of_the_heads(size: int) -> None:
    whole = 32 * BLOCK_SIZE * 2 * 8 * 128 * 2  # layers, tokens, keys and values, heads, numbers, bytes
    assert bytes_of_a_block(LLAMA, size) == whole // size


@pytest.mark.parametrize("size", [2, 4, 8])
def test_n_ranks_hold_n_times_the_context_in_the_same_memory_each(size: int) -> None:
    budget = 3 * 2**30
    alone, together = (blocks_in(budget, bytes_of_a_block(LLAMA, n)) for n in (1, size))
    assert together == size * alone


def test_a_head_that_several_ranks_need_is_cached_by_each_of_them() -> None:
    one_head = LLAMA | {"num_key_value_heads": 1}
    assert bytes_of_a_block(one_head, 4) == bytes_of_a_block(one_head, 1)
    two_heads = LLAMA | {"num_key_value_heads": 2}
    assert bytes_of_a_block(two_heads, 8) == bytes_of_a_block(two_heads, 2) == bytes_of_a_block(two_heads, 1) // 2


def test_a_latent_is_cached_whole_by_every_rank() -> None:
    """It is key and value of all heads at once: more ranks hold no more context."""
    spec = spec_of(DEEPSEEK)
    assert [slot_width(spec, tensor_parallel(size)) for size in (1, 2, 4)] == [512 + 64] * 3


def test_less_memory_than_a_block_is_refused_with_both_numbers() -> None:
    assert blocks_in(100, 100) == 1
    with pytest.raises(ModelRefused, match="99 bytes per rank is smaller than one block of 100 bytes"):
        blocks_in(99, 100)


def test_less_memory_than_a_block_for_each_group_of_layers_is_refused() -> None:
    """A sequence of one token takes a block in every group: with fewer no request could be served."""
    spec = spec_of(LLAMA)
    spec = replace(spec, layers=tuple(replace(layer, window=512 if i % 4 else None) for i, layer in enumerate(spec.layers)))
    block_bytes = bytes_of_block(spec, tensor_parallel(1), BLOCK_SIZE, 2)

    def num_blocks(kv_bytes: int) -> int:
        return cache_size(spec, tensor_parallel(1), CacheRequest(None, kv_bytes, BLOCK_SIZE, 4, 512, 2)).num_blocks

    assert num_blocks(4 * block_bytes) == 4
    with pytest.raises(ModelRefused, match=f"smaller than 4 blocks of {block_bytes} bytes, one for each group of layers"):
        num_blocks(4 * block_bytes - 1)


@pytest.mark.parametrize("compression", ["none", "lazy-fp8"])
@pytest.mark.parametrize("kv_bytes", [256 * MIB, 512 * MIB, 1024 * MIB])
def test_the_budget_that_is_advised_holds_a_sequence_of_the_whole_context(compression: KvCompression, kv_bytes: int) -> None:
    spec, tp = spec_of(LLAMA | {"max_position_embeddings": 131072}), tensor_parallel(1)
    zones = zones_of(compression, BLOCK_SIZE, BLOCK_SIZE, spec, tp)
    request = CacheRequest(None, kv_bytes, BLOCK_SIZE, 1, 512, 4, zones)
    cut = cache_size(spec, tp, request)
    assert cut.extents.tokens_in(cut.num_blocks) < 131072
    advised = cache_size(spec, tp, replace(request, kv_bytes=cut.bytes_for(131072)))
    assert advised.extents.tokens_in(advised.num_blocks) >= 131072


@pytest.mark.parametrize("rank", [0, 1])
def test_a_loaded_rank_of_two_has_twice_the_blocks_of_one_alone(
    checkpoint: Callable[..., Path], runner: Callable[..., ModelRunner], rank: int
) -> None:
    model_dir = checkpoint(seed=3)
    alone = runner(model_dir, num_blocks=None, kv_bytes=8 * MIB)
    of_two = runner(model_dir, tensor_parallel(2, rank), num_blocks=None, kv_bytes=8 * MIB)
    assert of_two.num_blocks == 2 * alone.num_blocks
    assert of_two.kv_bytes == alone.kv_bytes == 8 * MIB


@pytest.mark.parametrize("size", [1, 2])
def test_blocks_that_are_all_written_take_no_more_than_the_budget(size: int) -> None:
    num_layers, budget = 2, 128 * MIB
    tp, options = tensor_parallel(size), RunnerOptions(kv_bytes=budget, block_size=BLOCK_SIZE)
    spec = spec_of(LLAMA | {"num_hidden_layers": num_layers})
    num_blocks = blocks_in(budget, bytes_of_block(spec, tp, BLOCK_SIZE, options.torch_dtype.itemsize))
    before = resident_bytes()
    width, device = slot_width(spec, tp), options.torch_device
    cache = KVCache(num_layers, num_blocks, BLOCK_SIZE, width, dtype=options.torch_dtype, device=device)
    assert cache.nbytes == budget
    assert resident_bytes() - before < MIB  # untouched memory is only a promise
    for index in range(num_layers):
        cache.plane(index)[: cache.num_slots].fill_(1.0)
    grown = resident_bytes() - before
    assert 0.95 * budget < grown < budget + num_layers * 2 * LARGE_PAGE  # where one reaches over an end of a layer's blocks
    assert float(cache.plane(1)[cache.num_slots].abs().sum()) == 0.0


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def small_cache(num_blocks: int) -> KVCache:
    return KVCache(3, num_blocks, BLOCK_SIZE, 24, dtype=torch.float32, device=torch.device("cpu"))


def test_moved_blocks_have_the_same_bits_in_every_layer() -> None:
    cache = small_cache(8)
    for index in range(3):
        cache.plane(index)[: cache.num_slots] = torch.randn(cache.num_slots, 24)
    before = [cache.plane(index).clone() for index in range(3)]
    cache.move([(7, 1), (6, 0)])
    for index in range(3):
        slots = cache.plane(index)
        assert torch.equal(slots[:BLOCK_SIZE], before[index][6 * BLOCK_SIZE : 7 * BLOCK_SIZE])
        assert torch.equal(slots[BLOCK_SIZE : 2 * BLOCK_SIZE], before[index][7 * BLOCK_SIZE : 8 * BLOCK_SIZE])
        assert torch.equal(slots[2 * BLOCK_SIZE :], before[index][2 * BLOCK_SIZE :])


@pytest.mark.parametrize("kept", [0, 1, 3, 37, 99, 100])
def test_released_blocks_leave_the_others_and_the_zero_slot_as_they_are(kept: int) -> None:
    """The sizes are no multiples of a page."""
    cache = small_cache(100)
    for index in range(3):
        cache.plane(index)[: cache.num_slots] = 1.0
    cache.release(kept)
    for index in range(3):
        slots = cache.plane(index)
        assert (slots[: kept * BLOCK_SIZE] == 1.0).all()
        assert not slots[cache.num_slots].any()
        assert (slots[kept * BLOCK_SIZE : cache.num_slots].sum() < 2 * 4096 / 4) or kept > 90


def test_released_blocks_return_their_memory_and_can_be_written_again() -> None:
    num_layers, num_blocks = 2, 1024
    cache = KVCache(num_layers, num_blocks, BLOCK_SIZE, 512, dtype=torch.float32, device=torch.device("cpu"))
    for index in range(num_layers):
        cache.plane(index)[: cache.num_slots] = 1.0
    full = resident_bytes()
    cache.release(num_blocks // 4)
    freed = full - resident_bytes()
    assert abs(freed - 0.75 * cache.nbytes) < num_layers * LARGE_PAGE
    cache.plane(1)[: cache.num_slots] = 2.0
    assert (cache.plane(1)[: cache.num_slots] == 2.0).all()


def test_released_blocks_return_the_memory_of_their_bounds_too() -> None:
    num_blocks, width = 65_536, 128
    cache = KVCache(1, num_blocks, 1, width, dtype=torch.float32, device=torch.device("cpu"), bounded=True)
    bounds_B2Y = cache.pages(0, 0).bounds_B2Y
    assert bounds_B2Y is not None
    bounds_B2Y.fill_(1.0)
    full = resident_bytes()
    cache.release(num_blocks // 4)
    assert abs(full - resident_bytes() - 0.75 * bounds_B2Y.nbytes) < LARGE_PAGE
    assert (bounds_B2Y[: num_blocks // 4] == 1.0).all()


def test_bounds_of_keys_move_with_their_blocks_and_are_found_for_what_arrives() -> None:
    cache = KVCache(2, 5, BLOCK_SIZE, 12, dtype=torch.float16, device=torch.device("cpu"), bounded=True)
    for index in range(2):
        cache.plane(index).copy_(torch.randn(cache.plane(index).shape))
    cache.bound([4, 1])
    cache.move([(4, 0)])
    for index in range(2):
        bounds_B2Y = cache.pages(index, index).bounds_B2Y
        assert bounds_B2Y is not None
        for block in (0, 1):
            keys_SY = cache.block(block)[index, :, :6].float()
            assert torch.equal(bounds_B2Y[block], torch.stack((keys_SY.amin(0), keys_SY.amax(0))))
    assert cache.nbytes == 2 * 5 * (BLOCK_SIZE * 12 * 2 + 12 * 4)
