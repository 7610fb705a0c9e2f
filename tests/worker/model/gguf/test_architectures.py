"""Models through GGUF and back: the weights' bits, the decoder's numbers, and transformers' own reader of GGUF as a judge."""

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from ryzanstein.worker.model.architectures.registry import read_spec
from ryzanstein.worker.model.gguf import block_types
from ryzanstein.worker.model.gguf.dequantize import dequantize
from ryzanstein.worker.model.gguf.dialects import DIALECTS
from ryzanstein.worker.model.gguf.file import GgufFile
from ryzanstein.worker.model.refusal import ModelRefused

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
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
}
JUDGED = ("llama", "llama 3, tied", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "starcoder2")
"""Those whose files transformers reads itself."""
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
    assert {dialect.model_type for dialect in DIALECTS} == {model_type for model_type, _ in MODELS.values()}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_comes_back_bit_by_bit(
    name: str, tiny: Callable[..., Path], to_gguf: Callable[..., Path], from_gguf: Callable[..., Path], weights_of: Any
) -> None:
    model_type, changes = MODELS[name]
    before = tiny(model_type, **changes)
    after = from_gguf(to_gguf(before))
    old, new = weights_of(before), weights_of(after)
    assert old.keys() == new.keys()
    for key, tensor in old.items():
        # Gemma's norms are stored plus one: what is far below one loses bits.
        close = 1e-7 if model_type.startswith("gemma") and "norm" in key else 0
        assert (tensor - new[key]).abs().max() <= close, key
    assert (logits(before) - logits(after)).abs().max() <= (1e-5 if model_type.startswith("gemma") else 0)
    if model_type != "mistral":  # read as Llama, which is the same without a window
        assert read_spec(after) == read_spec(before)


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
    said = {key: reader.get_field(key).contents() for key in reader.fields if not key.startswith("GGUF.")}
    assert {key.removeprefix("llama."): value for key, value in said.items() if key.startswith("llama.")} == {
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
    assert (said["general.architecture"], said["general.file_type"]) == ("llama", 7)
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
    "an architecture without a dialect": ("bloom", {}, "model_type 'bloom' cannot be written as GGUF, only"),
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
    "architecture": ({"general.architecture": "mamba"}, "general.architecture 'mamba' is not supported, only command-r, gemma"),
    "no heads": ({"llama.attention.head_count": None}, r"llama\.attention\.head_count is missing"),
    "many layers": ({"llama.block_count": 10**6}, "num_hidden_layers"),
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


def rewritten(path: Path, changes: dict[str, Any]) -> Path:
    """A copy of a file with other metadata; None leaves one out."""
    from ryzanstein.worker.model.gguf.writer import PlannedTensor, write_header, write_tensor

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
