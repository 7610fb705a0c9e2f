"""InternLM 2 is Llama with other names and one tensor for queries, keys and values. transformers has only Llama, so the
reference is a Llama checkpoint that transformers wrote and answers, and ours are the same numbers under InternLM 2's names."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ryzanstein.worker.collectives.local import LocalCollectives
from ryzanstein.worker.collectives.parallel import TensorParallel
from ryzanstein.worker.engine.plan import StepPlan
from ryzanstein.worker.model.loading import slice_bytes
from ryzanstein.worker.settings.options import RunnerOptions

RENAMED = {
    "embed_tokens": "tok_embeddings",
    "lm_head": "output",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
}
PROJECTIONS = ("q_proj", "k_proj", "v_proj")
HEADS, KV_HEADS, LAYERS, HEAD_DIM = 6, 2, 2, 16
SHAPE = {
    "hidden_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "vocab_size": 251,
}


def rename(llama_dir: Path, out_dir: Path, *, bias: bool) -> None:
    """Of each key-value head first its queries, then the key, then the value: so the tensor of all three is stored."""
    tensors = load_file(llama_dir / "model.safetensors")
    for layer in range(LAYERS):
        for part in ("weight", "bias") if bias else ("weight",):
            names = (f"model.layers.{layer}.self_attn.{projection}.{part}" for projection in PROJECTIONS)
            heads = [tensors.pop(name).unflatten(0, (KV_HEADS, -1, HEAD_DIM)) for name in names]
            tensors[f"model.layers.{layer}.attention.wqkv.{part}"] = torch.cat(heads, dim=1).flatten(0, 2).contiguous()
    for old, new in RENAMED.items():
        tensors = {name.replace(old, new): tensor for name, tensor in tensors.items()}
    save_file(tensors, out_dir / "model.safetensors")
    config = json.loads((llama_dir / "config.json").read_text())
    config |= {"model_type": "internlm2", "architectures": ["InternLM2ForCausalLM"], "bias": bias}
    (out_dir / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("bias", [False, True])
def test_the_same_numbers_as_llama(
    bias: bool,
    tmp_path: Path,
    checkpoint: Callable[..., Path],
    runner: Callable[..., Any],
    reference: Callable[[Path], Any],
) -> None:
    llama_dir = checkpoint(seed=5, **SHAPE, attention_bias=bias)
    rename(llama_dir, tmp_path, bias=bias)
    ids = torch.randint(251, (90,), generator=torch.Generator().manual_seed(1)).tolist()
    expected = reference(llama_dir).logits(ids)
    loaded, table, done = runner(tmp_path), list(range(30)), 0
    for count in (41, 7, 1, 40, 1):
        logits = loaded.hidden_logits(StepPlan(1, ids[done : done + count], [count], [done], [table], [0]))
        done += count
        assert (logits[0] - expected[done - 1]).abs().max() < 1e-4


def test_two_ranks_have_half_of_the_heads_each(tmp_path: Path, checkpoint: Callable[..., Path]) -> None:
    rename(checkpoint(seed=5, **SHAPE), tmp_path, bias=False)
    options = RunnerOptions(num_blocks=8, kernels="torch")  # ours round outputs up
    whole, *halves = (
        slice_bytes(tmp_path, TensorParallel(rank, size, LocalCollectives()), options)
        for rank, size in ((0, 1), (0, 2), (1, 2))
    )
    norms = (2 * LAYERS + 1) * 96 * 4
    padding = 2 * 96 * 4  # one row of the vocabulary, of the embedding and of the head
    assert sum(halves) == whole + norms + padding
