"""Models through GGUF and back: the weights' bits, the decoder's numbers, and transformers' own reader of GGUF as a judge."""

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from ryzanstein.worker.architectures.registry import read_spec
from ryzanstein.worker.checkpoints.gguf.dequantize import dequantize
from ryzanstein.worker.checkpoints.gguf.dialects.table import DIALECTS
from ryzanstein.worker.checkpoints.gguf.file import GgufFile
from ryzanstein.worker.kernels.functions import block_types
from ryzanstein.worker.refusal import ModelRefused

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
GROWING = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.2,
}
DEEPSEEK_YARN = {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707}
GPT2 = {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 512, "n_inner": 96}
MPT = {"d_model": 64, "n_layers": 4, "n_heads": 4, "max_seq_len": 512}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENTS = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
    "num_nextn_predict_layers": 0,
}
GRANITE_HYBRID = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "mamba_n_heads": 8,
    "mamba_d_state": 32,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.5,
    "logits_scaling": 2.0,
}
FALCON_H1 = {"mamba_d_ssm": 128, "mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_d_state": 32}
DELTA = {
    "head_dim": 32,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "attention_bias": False,
}
GEMMA4 = {
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 32,
    "hidden_size_per_layer_input": 32,
    "vocab_size_per_layer_input": 320,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
NEMOTRON_H = {"head_dim": 16, "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 32}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama 3, tied": ("llama", {"rope_scaling": LLAMA3, "tie_word_embeddings": True}),
    "mistral": ("mistral", {"head_dim": 32, "sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen2, yarn": ("qwen2", {"rope_scaling": YARN}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "gemma": ("gemma", {"head_dim": 16}),
    "gemma2": ("gemma2", {"head_dim": 16, "sliding_window": 32, "query_pre_attn_scalar": 16}),
    "gemma3": (
        "gemma3_text",
        {"head_dim": 16, "sliding_window": 32, "query_pre_attn_scalar": 16, "num_hidden_layers": 7},
    ),
    "granite": (
        "granite",
        {"attention_multiplier": 0.2, "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 2.0},
    ),
    "smollm3": ("smollm3", {}),
    "olmo2": ("olmo2", {}),
    "phi3": ("phi3", {"sliding_window": None}),
    "cohere": ("cohere", {}),
    "starcoder2": ("starcoder2", {"sliding_window": None}),
    "olmo, clipped": ("olmo", {"clip_qkv": 0.5}),
    "phi": ("phi", {"partial_rotary_factor": 0.5, "num_key_value_heads": 4}),
    "stablelm": ("stablelm", {"partial_rotary_factor": 0.5, "use_qkv_bias": True}),
    "stablelm, parallel, with norms": (
        "stablelm",
        {"partial_rotary_factor": 0.25, "use_parallel_residual": True, "qk_layernorm": True},
    ),
    "gpt2": ("gpt2", GPT2),
    "gpt_neox": ("gpt_neox", {"rotary_pct": 0.25, "num_key_value_heads": 4}),
    "gpt_neox, one half after the other": ("gpt_neox", {"rotary_pct": 0.5, "use_parallel_residual": False}),
    "falcon, one key-value head": ("falcon", {}),
    "falcon, groups": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon, groups and one norm": (
        "falcon",
        {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
    ),
    "bloom": ("bloom", {"n_layer": 4, "n_head": 4}),
    "mpt": ("mpt", MPT),
    "mpt, clipped": ("mpt", {**MPT, "attn_config": {"clip_qkv": 0.5}}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "qwen2_moe": ("qwen2_moe", {**EXPERTS, "shared_expert_intermediate_size": 64}),
    "qwen3_moe": ("qwen3_moe", {**EXPERTS, "norm_topk_prob": True, "head_dim": 32}),
    "deepseek_v2": ("deepseek_v2", {**LATENTS, "q_lora_rank": None, "n_shared_experts": 2}),
    "deepseek_v2, all experts": ("deepseek_v2", {**LATENTS, "first_k_dense_replace": 0, "tie_word_embeddings": True}),
    "deepseek_v3": ("deepseek_v3", {**LATENTS, "n_group": 4, "topk_group": 2, "n_routed_experts": 8}),
    "deepseek_v3, yarn": ("deepseek_v3", {**LATENTS, "n_group": 1, "topk_group": 1, "rope_scaling": DEEPSEEK_YARN}),
    "arcee": ("arcee", {}),
    "nemotron": ("nemotron", {"num_key_value_heads": 4}),
    "jais2": ("jais2", {}),
    "olmoe": ("olmoe", {"num_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 4}),
    "hunyuan_v1_dense": ("hunyuan_v1_dense", {"head_dim": 16}),
    "seed_oss": ("seed_oss", {"head_dim": 16}),
    "ernie4_5": ("ernie4_5", {"head_dim": 16}),
    "glm": ("glm", {"head_dim": 16}),
    "glm4": ("glm4", {"head_dim": 16}),
    "cohere2": ("cohere2", {"sliding_window": 32}),
    "exaone4": ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 4}),
    "lfm2": (
        "lfm2",
        {"layer_types": ["conv", "full_attention", "conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    ),
    "olmo3": ("olmo3", {"sliding_window": 32}),
    "gpt_oss": (
        "gpt_oss",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "head_dim": 16,
            "sliding_window": 32,
            "rope_parameters": {**YARN, "rope_theta": 1e4, "truncate": False},
        },
    ),
    "qwen3_5": ("qwen3_5_text", DELTA),
    "qwen3_5, as many value heads as keys": ("qwen3_5_text", {**DELTA, "linear_num_value_heads": 2}),
    "qwen3_5_moe": ("qwen3_5_moe_text", {**DELTA, **EXPERTS, "shared_expert_intermediate_size": 64}),
    "qwen3_next": ("qwen3_next", {**DELTA, **EXPERTS, "shared_expert_intermediate_size": 64, "norm_topk_prob": True}),
    "gemma4": ("gemma4_text", {**GEMMA4, "num_kv_shared_layers": 2, "use_double_wide_mlp": True}),
    "gemma4, keys are values": (
        "gemma4_text",
        {
            **GEMMA4,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "hidden_size_per_layer_input": 0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma4, experts": (
        "gemma4_text",
        {
            **GEMMA4,
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 32,
        },
    ),
    "ministral3": ("ministral3", {"head_dim": 16, "rope_parameters": GROWING}),
    "granitemoe": (
        "granitemoe",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "attention_multiplier": 0.2, "logits_scaling": 2.0},
    ),
    "glm4_moe_lite": (
        "glm4_moe_lite",
        {
            **{key: value for key, value in LATENTS.items() if key != "first_k_dense_replace"},
            "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
            "rms_norm_eps": 1e-6,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
    "glm4_moe": (
        "glm4_moe",
        {
            "head_dim": 16,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 1.5,
            "use_qk_norm": True,
            "attention_bias": True,
            "num_nextn_predict_layers": 0,
        },
    ),
    "ernie4_5_moe": (
        "ernie4_5_moe",
        {
            "moe_k": 2,
            "moe_num_experts": 4,
            "moe_intermediate_size": 32,
            "moe_layer_start_index": 1,
            "moe_num_shared_experts": 2,
        },
    ),
    "lfm2_moe": (
        "lfm2_moe",
        {
            "layer_types": ["conv", "full_attention", "conv", "full_attention"],
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "num_dense_layers": 1,
            "moe_intermediate_size": 32,
        },
    ),
    "granitemoehybrid": (
        "granitemoehybrid",
        {**GRANITE_HYBRID, "num_local_experts": 0, "intermediate_size": 64, "shared_intermediate_size": 64},
    ),
    "granitemoehybrid, experts": (
        "granitemoehybrid",
        {**GRANITE_HYBRID, "num_local_experts": 4, "shared_intermediate_size": 64, "position_embedding_type": "rope"},
    ),
    "falcon_h1": ("falcon_h1", FALCON_H1),
    "falcon_h1, norm": ("falcon_h1", {**FALCON_H1, "mamba_rms_norm": True, "mamba_norm_before_gate": False}),
    "nemotron_h": (
        "nemotron_h",
        {**NEMOTRON_H, "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"]},
    ),
    "nemotron_h, experts": (
        "nemotron_h",
        {
            **NEMOTRON_H,
            "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "moe_shared_expert_intermediate_size": 64,
            "routed_scaling_factor": 1.5,
        },
    ),
}
JUDGED = (
    *("llama", "llama 3, tied", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "starcoder2", "qwen2_moe", "qwen3_moe"),
    *("gpt2", "bloom", "stablelm", "falcon, one key-value head"),
)
"""Those whose files transformers reads itself."""
PLUS_ONE = ("gemma", "nemotron", "qwen3_5", "qwen3_next")
INEXACT = (*PLUS_ONE, "granitemoehybrid", "falcon_h1")
"""Whose files have other numbers than a checkpoint, which come back rounded."""
STACKED = "gpt_oss"
IDS = torch.randint(3, 300, (1, 80), generator=torch.Generator().manual_seed(1))


def logits(model_dir: Path, **options: Any) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import AutoModelForCausalLM, logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, attn_implementation="eager", **options)
    with torch.inference_mode():
        found: torch.Tensor = model.eval()(IDS).logits[0]
    return found


def test_every_dialect_is_tried_here() -> None:
    tried = {model_type for model_type, _ in MODELS.values()}
    assert {dialect.model_type for dialect in DIALECTS} == tried | {"internlm2"}


@pytest.mark.parametrize("name", [name for name in MODELS if name != STACKED])
def test_a_model_comes_back_bit_by_bit(
    name: str, tiny: Callable[..., Path], to_gguf: Callable[..., Path], from_gguf: Callable[..., Path], weights_of: Any
) -> None:
    model_type, changes = MODELS[name]
    before = tiny(model_type, **changes)
    after = from_gguf(to_gguf(before))
    old, new = weights_of(before), weights_of(after)
    assert old.keys() == new.keys()
    for key, tensor in old.items():
        # Some norms are stored plus one, where what is far below one loses bits. Of decays the file has the exponential.
        close = 1e-6 if "A_log" in key else 2e-7 if model_type.startswith(PLUS_ONE) and "norm" in key else 0
        assert (tensor - new[key]).abs().max() <= close, key
    assert (logits(before) - logits(after)).abs().max() <= (1e-5 if model_type.startswith(INEXACT) else 0)
    # Read as Llama, which is the same without a window, and as DeepSeek V3, which is the same.
    if model_type not in ("mistral", "glm4_moe_lite"):
        assert read_spec(after) == read_spec(before)


def test_stacked_experts_with_biases_do_not_come_back(
    tiny: Callable[..., Path], to_gguf: Callable[..., Path], from_gguf: Callable[..., Path]
) -> None:
    model_type, changes = MODELS[STACKED]
    path = to_gguf(tiny(model_type, **changes))
    with pytest.raises(ModelRefused, match="has all experts of a layer in one tensor, which is not written: serve the file"):
        from_gguf(path)


@pytest.mark.parametrize("name", JUDGED)
def test_transformers_reads_our_file_as_the_same_model(
    name: str, tiny: Callable[..., Path], to_gguf: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its reader shares no code with ours. What it does not read from a file is passed to it."""
    # It asks for accelerate, which unwraps models that are spread over devices. This one is not.
    monkeypatch.setattr("transformers.modeling_utils.is_accelerate_available", lambda: True)
    unwrap = "transformers.modeling_utils.extract_model_from_parallel"
    monkeypatch.setattr(unwrap, lambda model, **_: model, raising=False)
    model_type, changes = MODELS[name]
    before = tiny(model_type, **changes)
    path = to_gguf(before)
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(before)
    found = logits(path.parent, gguf_file=path.name, config=config)
    assert (logits(before) - found).abs().max() < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_comes_back_bit_by_bit(
    dtype: torch.dtype, tiny: Callable[..., Path], to_gguf: Callable[..., Path], from_gguf: Callable[..., Path], weights_of: Any
) -> None:
    before = tiny("qwen3", dtype, head_dim=32)
    after = from_gguf(to_gguf(before, {torch.bfloat16: "bf16", torch.float16: "f16"}[dtype]))
    old, new = weights_of(before), weights_of(after)
    assert {tensor.dtype for tensor in new.values()} == {dtype}
    assert all(torch.equal(tensor, new[key]) for key, tensor in old.items())
    assert json.loads((after / "config.json").read_text())["torch_dtype"] == str(dtype).removeprefix("torch.")


@pytest.mark.parametrize("kind", ["q8_0", "q4_0", "q4_k", "q6_k"])
def test_quantized_files_have_the_numbers_of_their_blocks(
    kind: str, tiny: Callable[..., Path], to_gguf: Callable[..., Path], from_gguf: Callable[..., Path], weights_of: Any
) -> None:
    """gguf reads the blocks; a matrix is compared that is in the file as it is in the checkpoint."""
    before = tiny("qwen2", hidden_size=256, intermediate_size=512)
    path = to_gguf(before, kind)
    new = weights_of(from_gguf(path))["model.layers.1.mlp.down_proj.weight"].numpy()
    (tensor,) = (each for each in gguf.GGUFReader(path).tensors if each.name == "blk.1.ffn_down.weight")
    assert tensor.tensor_type.name == kind.upper()
    assert np.array_equal(gguf.dequantize(tensor.data, tensor.tensor_type), new)


def test_blocks_come_back_through_float32(
    tiny: Callable[..., Path], to_gguf: Callable[..., Path], from_gguf: Callable[..., Path]
) -> None:
    """Q8_0's scale is found again from the numbers: the blocks are the same, not only the numbers."""
    path = to_gguf(tiny("llama", hidden_size=128), "q8_0")
    again = to_gguf(from_gguf(path), "q8_0", "again.gguf")
    with GgufFile.open(path) as one, GgufFile.open(again) as other:
        for name, tensor in one.tensors.items():
            numbers = [dequantize(each.blocks, each.type) for each in (tensor, other.tensors[name])]
            assert np.allclose(*numbers, rtol=1e-3, atol=1e-5), name


def test_our_file_says_what_llama_cpp_asks_for(tiny: Callable[..., Path], to_gguf: Callable[..., Path]) -> None:
    path = to_gguf(tiny("llama"), "q8_0")
    reader = gguf.GGUFReader(path)
    message = {key: reader.get_field(key).contents() for key in reader.fields if not key.startswith("GGUF.")}
    assert {key.removeprefix("llama."): value for key, value in message.items() if key.startswith("llama.")} == {
        "vocab_size": 320,
        "context_length": 512,
        "embedding_length": 64,
        "block_count": 4,
        "feed_forward_length": 96,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.key_length": 16,
        "attention.value_length": 16,
        "attention.layer_norm_rms_epsilon": np.float32(1e-6),
        "rope.dimension_count": 16,
        "rope.freq_base": 10000.0,
    }
    assert (message["general.architecture"], message["general.file_type"]) == ("llama", 7)
    assert [tuple(tensor.shape) for tensor in reader.tensors if tensor.name == "blk.0.ffn_up.weight"] == [(64, 96)]


def test_a_width_that_is_no_whole_block_is_stored_otherwise_and_told(
    tiny: Callable[..., Path], to_gguf: Callable[..., Path]
) -> None:
    path = to_gguf(tiny("llama", intermediate_size=256), "q4_k")
    with GgufFile.open(path) as file:
        kinds = {name: tensor.type.name for name, tensor in file.tensors.items()}
    assert kinds["blk.0.ffn_down.weight"] == "Q4_K"
    assert kinds["blk.0.ffn_up.weight"] == "Q5_0"
    assert kinds["output.weight"] == "Q8_0"
    assert kinds["output_norm.weight"] == "F32"
    notes = path.with_suffix(".log").read_text()
    assert "q4_k: stored as Q5_0: " in notes
    assert "with rows of 64" in notes


def test_internlm2_is_written_as_itself_and_read_as_llama(
    tiny: Callable[..., Path], to_gguf: Callable[..., Path], from_gguf: Callable[..., Path], weights_of: Any
) -> None:
    """transformers does not have it: a Llama that it wrote is stored in the other way first."""
    before = tiny("llama")
    after = from_gguf(to_gguf(as_internlm2(before)))
    old, new = weights_of(before), weights_of(after)
    assert old.keys() == new.keys()
    assert all(torch.equal(tensor, new[key]) for key, tensor in old.items())
    assert read_spec(after) == read_spec(before)


def as_internlm2(llama: Path) -> Path:
    """Of each key-value head first its queries, then the key, then the value, in one tensor."""
    model_dir = llama.with_name("internlm2")
    shutil.copytree(llama, model_dir)
    tensors = load_file(llama / "model.safetensors")
    for prefix in {name.split("self_attn")[0] for name in tensors if "self_attn" in name}:
        heads = [tensors.pop(f"{prefix}self_attn.{each}_proj.weight").unflatten(0, (2, -1, 16)) for each in "qkv"]
        tensors[f"{prefix}attention.wqkv.weight"] = torch.cat(heads, dim=1).flatten(0, 2).contiguous()
    renamed = {
        "embed_tokens": "tok_embeddings",
        "lm_head": "output",
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.o_proj": "attention.wo",
        "mlp.gate_proj": "feed_forward.w1",
        "mlp.up_proj": "feed_forward.w3",
        "mlp.down_proj": "feed_forward.w2",
    }
    for old, new in renamed.items():
        tensors = {name.replace(old, new): tensor for name, tensor in tensors.items()}
    save_file(tensors, model_dir / "model.safetensors")
    config = json.loads((llama / "config.json").read_text())
    (model_dir / "config.json").write_text(json.dumps({**config, "model_type": "internlm2", "bias": False}))
    return model_dir


REFUSED = {
    "a window that llama.cpp has no name for": ("mistral", {"sliding_window": 32}, "layers cannot be written: llama in GGUF"),
    "Gemma with other windows": (
        "gemma3_text",
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "sliding_window": 32,
        },
        "layers cannot be written: gemma3 in GGUF means",
    ),
    "Gemma with another scale": (
        "gemma2",
        {"head_dim": 16, "query_pre_attn_scalar": 20, "sliding_window": 32},
        "layers cannot be written",
    ),
    "DeepSeek V2's choice of groups": (
        "deepseek_v2",
        {**LATENTS, "topk_method": "group_limited_greedy", "n_group": 2, "topk_group": 1, "n_routed_experts": 8},
        "topk_group cannot be written as GGUF: 1 of 2 groups, rated by 1 experts each",
    ),
    "experts whose weights do not add up to 1": ("qwen3_moe", EXPERTS, "layers cannot be written: qwen3moe in GGUF means"),
    "Falcon with ALiBi": ("falcon", {"alibi": True}, "alibi cannot be written|rotaries cannot be written|layers cannot be"),
    "Falcon with biases": ("falcon", {"bias": True}, "qkv_bias cannot be written: falcon in GGUF means False"),
    "a tied head where llama.cpp needs one": ("gpt_neox", {"tie_word_embeddings": True}, "tied_head cannot be written"),
    "Granite 4 of attention alone": (
        "granitemoehybrid",
        {**GRANITE_HYBRID, "num_local_experts": 0, "layer_types": ["full_attention"] * 4},
        "layer_types without Mamba 2 cannot be written as GGUF",
    ),
    "Falcon H1 with factors": (
        "falcon_h1",
        {**FALCON_H1, "key_multiplier": 0.5},
        "layers cannot be written: falcon-h1 in GGUF",
    ),
    "Falcon H1 with its norm first": (
        "falcon_h1",
        {**FALCON_H1, "mamba_rms_norm": True},
        "layers cannot be written: falcon-h1",
    ),
    "Nemotron 3 with groups of experts": (
        "nemotron_h",
        {**NEMOTRON_H, "layers_block_type": ["moe", "full_attention", "linear_attention"], "n_group": 2, "topk_group": 2},
        "layers cannot be written: nemotron_h_moe in GGUF",
    ),
    "an architecture without a dialect": ("opt", {}, "model_type 'opt' cannot be written as GGUF, only"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_model_that_gguf_cannot_describe_is_refused(
    case: str, tiny: Callable[..., Path], to_gguf: Callable[..., Path], tmp_path: Path
) -> None:
    model_type, changes, reason = REFUSED[case]
    with pytest.raises(ModelRefused, match=reason):
        to_gguf(tiny(model_type, **changes))
    assert list(tmp_path.iterdir()) == []


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "architecture": (
        {"general.architecture": "mamba"},
        "general.architecture 'mamba' is not supported, only arcee, bloom, chatglm",
    ),
    "no heads": ({"llama.attention.head_count": None}, r"llama\.attention\.head_count is missing"),
    "many layers": ({"llama.block_count": 10**6}, r"tensor 'blk\.4\.\S+ is missing"),
    "a layer too many": ({"llama.block_count": 5}, r"tensor 'blk\.4\.\S+ is missing"),
    "a layer too few": ({"llama.block_count": 3}, r"tensor 'blk\.3\.\S+ is not used by this architecture"),
    "other heads": ({"llama.attention.head_count": 2}, "rope.dimension_count is 16, but a head has|has shape"),
    "rotated in part": ({"llama.rope.dimension_count": 8}, "rope.dimension_count is 8, but a head has 16 numbers"),
    "width": ({"llama.embedding_length": 128}, r"tensor token_embd\.weight has shape \[320, 64\], must be \[vocabulary, 128\]"),
    "scaling": ({"llama.rope.scaling.type": "longrope"}, "rope.scaling.type 'longrope' is not supported"),
    "epsilon": ({"llama.attention.layer_norm_rms_epsilon": float("nan")}, "rms_norm_eps"),
    "heads that differ": (
        {"llama.attention.head_count_kv": np.array([2, 2, 1, 2], np.int32)},
        "must be a count, the same for all layers",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_metadata_that_do_not_fit_are_refused_by_key(
    case: str, tiny: Callable[..., Path], to_gguf: Callable[..., Path], from_gguf: Callable[..., Path], tmp_path: Path
) -> None:
    changes, reason = WRONG[case]
    path = rewritten(to_gguf(tiny("llama")), changes)
    with pytest.raises(ModelRefused, match=reason):
        from_gguf(path)
    assert not (tmp_path / "converted").exists()


@pytest.mark.parametrize("name", ["glm4_moe", "deepseek_v3, yarn"])
def test_layers_that_predict_further_tokens_are_not_read(
    name: str, tiny: Callable[..., Path], to_gguf: Callable[..., Path], from_gguf: Callable[..., Path], weights_of: Any
) -> None:
    model_type, changes = MODELS[name]
    before = tiny(model_type, **changes)
    prefix = {"glm4_moe": "glm4moe", "deepseek_v3": "deepseek2"}[model_type]
    after = from_gguf(rewritten(to_gguf(before), {f"{prefix}.nextn_predict_layers": 1}))
    old, new = weights_of(before), weights_of(after)
    assert new.keys() == {key for key in old if ".layers.3." not in key}
    assert all(torch.equal(tensor, old[key]) for key, tensor in new.items())
    assert read_spec(after).num_layers == 3
    with pytest.raises(ModelRefused, match="nextn_predict_layers must be below the number of blocks"):
        from_gguf(rewritten(to_gguf(before), {f"{prefix}.nextn_predict_layers": 4}))


WRONG_LAYERS: dict[str, tuple[str, dict[str, Any], str]] = {
    "no heads": ("granitemoehybrid", {"attention.head_count_kv": 0}, "must be one count, or 0, for each layer"),
    "other heads": (
        "nemotron_h",
        {"attention.head_count_kv": np.array([0, 1, 2, 0], np.int32)},
        "must be one count, or 0, for each layer",
    ),
    "too few": ("nemotron_h", {"feed_forward_length": np.array([0, 96], np.int32)}, "must be a count for each of 4 layers"),
    "below 0": ("nemotron_h", {"feed_forward_length": np.array([0, -96, 0, 0], np.int32)}, "must be a count for each of"),
    "heads of no size": ("falcon_h1", {"ssm.time_step_rank": 7}, "over which the 128 numbers of ssm.inner_size do not divide"),
    "groups": ("falcon_h1", {"ssm.group_count": 3}, "mamba_n_groups is 3, over which 8 heads do not divide"),
    "groups of experts": ("nemotron_h, experts", {"expert_group_count": 2}, "expert_group_count is 2, only 1 is supported"),
}


@pytest.mark.parametrize("case", WRONG_LAYERS)
def test_layers_of_several_kinds_that_do_not_fit_are_refused_by_key(
    case: str, tiny: Callable[..., Path], to_gguf: Callable[..., Path], from_gguf: Callable[..., Path]
) -> None:
    name, changes, reason = WRONG_LAYERS[case]
    model_type, fields = MODELS[name]
    path = to_gguf(tiny(model_type, **fields))
    with GgufFile.open(path) as file:
        prefix = file.metadata["general.architecture"]
    with pytest.raises(ModelRefused, match=reason):
        from_gguf(rewritten(path, {f"{prefix}.{key}": value for key, value in changes.items()}))


def test_what_nemotron_3_has_behind_its_layers_is_not_read(
    tiny: Callable[..., Path], to_gguf: Callable[..., Path], from_gguf: Callable[..., Path]
) -> None:
    model_type, changes = MODELS["nemotron_h, experts"]
    after = from_gguf(rewritten(to_gguf(tiny(model_type, **changes)), {"nemotron_h_moe.nextn_predict_layers": 1}))
    assert [layer.experts is not None for layer in read_spec(after).layers] == [False, True, False]


WRONG_EXPERTS: dict[str, tuple[dict[str, Any], str]] = {
    "none": ({"expert_count": 0}, "expert_count must be a count"),
    "others than there are": ({"expert_count": 5}, r"has shape \[4, .*\], must be of 5 experts"),
    "absurdly many": ({"expert_count": 2**31 - 1}, "expert_count is 2147483647 in 4 layers; all layers together"),
    "an array": ({"expert_count": np.array([4, 3, 4, 4], np.int32)}, "expert_count must be a count"),
    "more used than there are": ({"expert_used_count": 5}, "num_experts_per_tok is 5, but there are only 4"),
    "none used": ({"expert_used_count": 0}, "expert_used_count must be a count"),
    "another width": ({"expert_feed_forward_length": 2**31}, "moe_intermediate_size must be at most"),
    "many layers": ({"block_count": 4096}, r"is missing"),
}


@pytest.mark.parametrize("model_type", ["qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize("case", WRONG_EXPERTS)
def test_experts_that_do_not_fit_are_refused_by_key(
    case: str, model_type: str, tiny: Callable[..., Path], to_gguf: Callable[..., Path], from_gguf: Callable[..., Path]
) -> None:
    """Before the tensors of any expert are listed: nobody can make a node count experts for hours."""
    changes, reason = WRONG_EXPERTS[case]
    name, prefix = {"qwen3_moe": ("qwen3_moe", "qwen3moe"), "deepseek_v3": ("deepseek_v3, yarn", "deepseek2")}[model_type]
    path = rewritten(to_gguf(tiny(model_type, **MODELS[name][1])), {f"{prefix}.{key}": value for key, value in changes.items()})
    with pytest.raises(ModelRefused, match=reason):
        from_gguf(path)


FUSED = {
    "queries, keys and values": ("qwen2", [("attn_q", "attn_k", "attn_v")], "attn_qkv", 0),
    "gates and ups of experts": ("qwen3_moe", [("ffn_gate_exps", "ffn_up_exps")], "ffn_gate_up_exps", 1),
}


@pytest.mark.parametrize("case", FUSED)
def test_fused_tensors_are_read(
    case: str, tiny: Callable[..., Path], to_gguf: Callable[..., Path], from_gguf: Callable[..., Path], weights_of: Any
) -> None:
    """Newer files may have them, along the rows of each expert. We do not write them."""
    model_type, (parts,), name, axis = FUSED[case]
    before = tiny(model_type, **MODELS[model_type][1])
    path = to_gguf(before)
    after = from_gguf(fused(path, parts, name, axis))
    old, new = weights_of(before), weights_of(after)
    assert old.keys() == new.keys()
    assert all(torch.equal(tensor, new[key]) for key, tensor in old.items())


def fused(path: Path, parts: tuple[str, ...], name: str, axis: int) -> Path:
    from ryzanstein.tools.convert.writer import PlannedTensor, write_header, write_tensor

    other = path.with_name("fused.gguf")
    with GgufFile.open(path) as file, other.open("wb") as out:
        arrays = {each.name: np.frombuffer(each.blocks, np.float32).reshape(each.shape) for each in file.tensors.values()}
        for first in [key for key in arrays if f".{parts[0]}." in key]:
            stack = [arrays.pop(first.replace(parts[0], part)) for part in parts]
            arrays[first.replace(parts[0], name)] = np.concatenate(stack, axis)
        planned = [PlannedTensor(key, block_types.F32, array.shape) for key, array in arrays.items()]
        write_header(out, file.metadata, planned)
        for plan in planned:
            write_tensor(out, plan, [np.ascontiguousarray(arrays[plan.name]).reshape(-1).view(np.uint8)])
    return other


def test_older_files_of_deepseek_are_read(
    tiny: Callable[..., Path], to_gguf: Callable[..., Path], from_gguf: Callable[..., Path], weights_of: Any
) -> None:
    """They have keys and values of heads in one tensor, as a checkpoint has, and the sizes of heads."""
    from ryzanstein.tools.convert.writer import PlannedTensor, write_header, write_tensor

    before = tiny("deepseek_v2", **LATENTS)
    path, old = to_gguf(before), weights_of(before)
    other = path.with_name("older.gguf")
    with GgufFile.open(path) as file, other.open("wb") as out:
        changes = {"key_length": 24, "value_length": 12, "head_count_kv": 4, "key_length_mla": None, "value_length_mla": None}
        metadata = {**file.metadata, **{f"deepseek2.attention.{key}": value for key, value in changes.items()}}
        kept = {
            each.name: each for each in file.tensors.values() if "attn_k_b" not in each.name and "attn_v_b" not in each.name
        }
        arrays = {name: np.frombuffer(each.blocks, np.float32).reshape(each.shape) for name, each in kept.items()}
        for layer in range(4):
            arrays[f"blk.{layer}.attn_kv_b.weight"] = old[f"model.layers.{layer}.self_attn.kv_b_proj.weight"].numpy()
        planned = [PlannedTensor(key, block_types.F32, array.shape) for key, array in arrays.items()]
        write_header(out, {key: value for key, value in metadata.items() if value is not None}, planned)
        for plan in planned:
            write_tensor(out, plan, [np.ascontiguousarray(arrays[plan.name]).reshape(-1).view(np.uint8)])
    new = weights_of(from_gguf(other))
    assert old.keys() == new.keys()
    assert all(torch.equal(tensor, new[key]) for key, tensor in old.items())


def rewritten(path: Path, changes: dict[str, Any]) -> Path:
    """A copy of a file with other metadata; None leaves one out."""
    from ryzanstein.tools.convert.writer import PlannedTensor, write_header, write_tensor

    other = path.with_name("other.gguf")
    with GgufFile.open(path) as file, other.open("wb") as out:
        metadata = {key: value for key, value in {**file.metadata, **changes}.items() if value is not None}
        planned = [PlannedTensor(each.name, each.type, each.shape) for each in file.tensors.values()]
        write_header(out, metadata, planned)
        for plan in planned:
            write_tensor(out, plan, [np.frombuffer(file.tensor(plan.name).blocks, np.uint8)])
    return other


def test_rope_factors_that_are_not_llama_3s_are_refused(
    tiny: Callable[..., Path], to_gguf: Callable[..., Path], from_gguf: Callable[..., Path]
) -> None:
    path = to_gguf(tiny("llama", rope_scaling=LLAMA3))
    with GgufFile.open(path) as file:
        tensor = file.tensor("rope_freqs.weight")
        offset, kind = tensor.offset, tensor.type
    assert kind == block_types.F32
    content = bytearray(path.read_bytes())
    content[offset : offset + 4] = np.float32(3.0).tobytes()
    path.write_bytes(content)
    with pytest.raises(ModelRefused, match="does not have the factors of Llama 3's scaling"):
        from_gguf(path)
