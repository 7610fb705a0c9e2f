"""A small adapter with random weights, as peft writes one."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

_RANK = 4
# Small enough that the model still writes what it was trained to, large enough that its log probabilities are others.
_SIZE = 0.01


def random_adapter(directory: Path, model: Path, *, seed: int = 11, rank: int = _RANK, size: float = _SIZE) -> Path:
    """Writes an adapter of a Llama's attention and MLP, and returns its directory."""
    config = json.loads((model / "config.json").read_text())
    width, head = config["hidden_size"], config["head_dim"]
    keys, inner = config["num_key_value_heads"] * head, config["intermediate_size"]
    queries = config["num_attention_heads"] * head
    attention = {"q_proj": (width, queries), "k_proj": (width, keys), "v_proj": (width, keys), "o_proj": (queries, width)}
    mlp = {"gate_proj": (width, inner), "up_proj": (width, inner), "down_proj": (inner, width)}
    shapes = {f"self_attn.{name}": shape for name, shape in attention.items()} | {
        f"mlp.{name}": each for name, each in mlp.items()
    }
    random, tensors = np.random.default_rng(seed), {}
    for layer in range(config["num_hidden_layers"]):
        for name, (inputs, outputs) in shapes.items():
            prefix = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{prefix}.lora_A.weight"] = random.normal(0, inputs**-0.5, (rank, inputs)).astype(np.float32)
            tensors[f"{prefix}.lora_B.weight"] = random.normal(0, size, (outputs, rank)).astype(np.float32)
    directory.mkdir(parents=True)
    save_file(tensors, directory / "adapter_model.safetensors")
    described = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": sorted({**attention, **mlp})}
    (directory / "adapter_config.json").write_text(json.dumps(described))
    return directory
