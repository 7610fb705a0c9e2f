"""Writes a Llama checkpoint as llama.cpp's Q8_0: `python -P -m runners.write_gguf MODEL_DIR FILE`.

Matrices are quantized and norms stay float32, as llama.cpp's own converter does with
`--outtype q8_0`. The file has no vocabulary: prompts are token ids. Tensors are read, written and
dropped one after another.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors import safe_open

_Q8_0 = gguf.GGMLQuantizationType.Q8_0


def write(model_dir: Path, path: Path) -> None:
    """Writes the file. Raises ValueError for what is not Llama with plain rotary positions.

    Other models would need other tables.
    """
    config = json.loads((model_dir / "config.json").read_text())
    _check(config)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    writer = gguf.GGUFWriter(path, "llama", use_temp_file=True)
    _write_shape(writer, config)
    for name, tensor in _tensors(model_dir):
        values = _interleaved(name, tensor.float(), config).numpy()
        gguf_name = names.get_name(name, try_suffixes=(".weight",)) or name
        if values.ndim == 2:
            writer.add_tensor(gguf_name, gguf.quants.quantize(values, _Q8_0), raw_dtype=_Q8_0)
        else:
            writer.add_tensor(gguf_name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _check(config: Mapping[str, Any]) -> None:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if config["model_type"] != "llama" or rope.get("rope_type", "default") != "default" or config.get("attention_bias"):
        raise ValueError("only Llama without rotary scaling and biases is converted")


def _write_shape(writer: Any, config: Mapping[str, Any]) -> None:
    num_heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // num_heads
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(num_heads)
    writer.add_head_count_kv(_num_kv_heads(config))
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base((config.get("rope_parameters") or config).get("rope_theta", 10000.0))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)


def _num_kv_heads(config: Mapping[str, Any]) -> int:
    return int(config.get("num_key_value_heads") or config["num_attention_heads"])


def _tensors(model_dir: Path) -> Iterator[tuple[str, torch.Tensor]]:
    for file in sorted(model_dir.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118, not a mapping
                yield name, tensors.get_tensor(name)


def _interleaved(name: str, tensor: torch.Tensor, config: Mapping[str, Any]) -> torch.Tensor:
    """Returns rows of queries and keys in llama.cpp's order.

    A rotary pair is two neighbours, not number i of each half.
    """
    heads = {"q_proj": config["num_attention_heads"], "k_proj": _num_kv_heads(config)}
    for projection, num_heads in heads.items():
        if name.endswith(f"{projection}.weight"):
            rows, columns = tensor.shape
            return tensor.view(num_heads, 2, rows // num_heads // 2, columns).transpose(1, 2).reshape(rows, columns)
    return tensor


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]))
