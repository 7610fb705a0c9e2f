"""Small random models, quantized here with numpy as the formats are published, each beside its numbers as floats.

The writers share nothing with the readers: levels become a stream of bits, and a stream becomes words.
"""

import json
import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor

Array = NDArray[Any]
Tensors = dict[str, Tensor]
VOCAB = 320
SIZES = {
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 384,
    "vocab_size": VOCAB,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
MORE = {"gemma3_text": {"head_dim": 32, "sliding_window": 16, "query_pre_attn_scalar": 32, "tie_word_embeddings": True}}
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


@dataclass(frozen=True)
class Recipe:
    """How a model is quantized."""

    method: str
    bits: int = 4
    group: int | None = 64
    symmetric: bool = True
    scale_dtype: torch.dtype = torch.float16
    act_order: bool = False
    more: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Published:
    """A quantized directory, and one of floats with its numbers."""

    directory: Path
    floats: Path


def words(levels: Array, bits: int) -> Tensor:
    """Packs the last dimension, lowest bits first."""
    stream = (levels[..., None].astype(np.int64) >> np.arange(bits) & 1).astype(np.uint8)
    stream = stream.reshape(*levels.shape[:-1], -1)
    padded = np.pad(stream, [(0, 0)] * (stream.ndim - 1) + [(0, -stream.shape[-1] % 32)])
    return torch.from_numpy(np.ascontiguousarray(np.packbits(padded, axis=-1, bitorder="little")).view(np.int32))


def rounded(weight_OI: Array, recipe: Recipe) -> tuple[Array, Tensor, Array, Array]:
    """Returns unsigned levels [O, I], scales [O, G], zero points [O, G] and the group of each input."""
    num_outputs, num_inputs = weight_OI.shape
    group, most = recipe.group or num_inputs, (1 << recipe.bits) - 1
    index_I = np.arange(num_inputs) // group
    if recipe.act_order:
        index_I = np.random.default_rng(1).permutation(index_I)
    groups = [weight_OI[:, index_I == g] for g in range(-(-num_inputs // group))]
    low = np.stack([np.minimum(part.min(axis=1), 0) for part in groups], axis=1)
    high = np.stack([np.maximum(part.max(axis=1), 0) for part in groups], axis=1)
    if recipe.symmetric:
        high = np.maximum(high, -low)
        low, zero = -high, np.full((num_outputs, len(groups)), 1 << (recipe.bits - 1))
        scale = torch.from_numpy(2 * high / most).to(recipe.scale_dtype)
    else:
        scale = torch.from_numpy((high - low) / most).to(recipe.scale_dtype)
        zero = np.clip(np.rint(-low / scale.float().numpy()), 0, most).astype(np.int64)
    steps = scale.float().numpy()[:, index_I]
    levels = np.clip(np.rint(weight_OI / steps) + zero[:, index_I], 0, most).astype(np.int64)
    return levels, scale, zero, index_I


def gptq(module: str, weight_OI: Array, recipe: Recipe) -> tuple[Tensors, Tensor]:
    levels, scale, zero, index_I = rounded(weight_OI, recipe)
    stored_zero = words(zero.T, recipe.bits)
    if recipe.more.get("checkpoint_format", "gptq") == "gptq":
        ones = sum(1 << bit for bit in range(0, 32, recipe.bits))  # GPTQModel subtracts from words
        stored_zero = torch.from_numpy((stored_zero.numpy().view(np.uint32) - np.uint32(ones)).view(np.int32))
    tensors = {
        f"{module}.qweight": words(levels, recipe.bits).t(),
        f"{module}.qzeros": stored_zero,
        f"{module}.scales": scale.t(),
        f"{module}.g_idx": torch.from_numpy(index_I.astype(np.int32)),
    }
    return tensors, scale.float()[:, index_I] * torch.from_numpy(levels - zero[:, index_I])


def awq(module: str, weight_OI: Array, recipe: Recipe) -> tuple[Tensors, Tensor]:
    levels, scale, zero, index_I = rounded(weight_OI, recipe)

    def packed(across: Array) -> Tensor:
        return words(across.reshape(len(across), -1, 8)[:, :, AWQ_ORDER].reshape(len(across), -1), 4)

    tensors = {
        f"{module}.qweight": packed(levels.T),
        f"{module}.qzeros": packed(zero.T),
        f"{module}.scales": scale.t(),
    }
    return tensors, scale.float()[:, index_I] * torch.from_numpy(levels - zero[:, index_I])


def compressed(module: str, weight_OI: Array, recipe: Recipe) -> tuple[Tensors, Tensor]:
    if recipe.more.get("type") == "float":
        return float8(module, weight_OI, recipe)
    levels, scale, zero, index_I = rounded(weight_OI, recipe)
    rows = recipe.more["block_structure"][0] if recipe.more.get("strategy") == "block" else 1
    if rows > 1:  # all outputs of a block have the scales and zero points of its first
        of_block = np.arange(len(levels)) // rows * rows
        scale, zero = scale[of_block], zero[of_block]
        steps, most = scale.float().numpy()[:, index_I], (1 << recipe.bits) - 1
        levels = np.clip(np.rint(weight_OI / steps) + zero[:, index_I], 0, most).astype(np.int64)
    half = 1 << (recipe.bits - 1)
    tensors = {f"{module}.weight_scale": scale[::rows]}
    packed = recipe.more["format"] == "pack-quantized"
    if packed:
        tensors[f"{module}.weight_packed"] = words(levels, recipe.bits)
        tensors[f"{module}.weight_shape"] = torch.tensor(weight_OI.shape)
    else:
        tensors[f"{module}.weight"] = torch.from_numpy((levels - half).astype(np.int8))
    if not recipe.symmetric:
        unpacked = torch.from_numpy((zero - half)[::rows].astype(np.int8))
        tensors[f"{module}.weight_zero_point"] = words(zero.T, recipe.bits).t() if packed and rows == 1 else unpacked
    if recipe.act_order:
        tensors[f"{module}.weight_g_idx"] = torch.from_numpy(index_I.astype(np.int32))
    return tensors, scale.float()[:, index_I] * torch.from_numpy(levels - zero[:, index_I])


def float8(module: str, weight_OI: Array, recipe: Recipe) -> tuple[Tensors, Tensor]:
    """A scale for each block of rows and columns; without one, for the tensor."""
    weight = torch.from_numpy(weight_OI)
    block = recipe.more.get("weight_block_size") or recipe.more.get("block_structure") or weight.shape
    if recipe.more.get("strategy") == "channel":
        block = (1, weight.shape[1])
    rows, columns = (torch.arange(size) // step for size, step in zip(weight.shape, block, strict=True))
    scale = torch.zeros(int(rows[-1]) + 1, int(columns[-1]) + 1)
    flat = (rows[:, None] * scale.shape[1] + columns).flatten()
    scale = scale.flatten().scatter_reduce(0, flat, weight.abs().flatten(), "amax").view_as(scale) / 448
    scale = scale.to(recipe.scale_dtype)
    steps = scale.float()[rows][:, columns]
    stored = (weight / steps).to(torch.float8_e4m3fn)
    suffix = "weight_scale_inv" if recipe.method == "fp8" else "weight_scale"
    whole = scale.numel() == 1 and recipe.more.get("strategy") != "channel"
    return {f"{module}.weight": stored, f"{module}.{suffix}": scale.view(1) if whole else scale}, stored.float() * steps


def bitnet(module: str, weight_OI: Array, recipe: Recipe) -> tuple[Tensors, Tensor]:
    divided = recipe.more.get("linear_class") == "bitlinear"
    mean = np.abs(weight_OI).mean()
    scale = torch.tensor([1 / mean if divided else mean]).to(recipe.scale_dtype)
    factor = 1 / scale.float() if divided else scale.float()
    levels = np.clip(np.rint(weight_OI / factor.numpy()), -1, 1).astype(np.int64)
    quarters = (levels + 1).reshape(4, -1, levels.shape[1])
    packed = sum(quarters[n] << 2 * n for n in range(4))
    tensors = {f"{module}.weight": torch.from_numpy(packed.astype(np.uint8)), f"{module}.weight_scale": scale}
    return tensors, factor * torch.from_numpy(levels)


WRITERS = {"gptq": gptq, "awq": awq, "compressed-tensors": compressed, "fp8": float8, "bitnet": bitnet}


def quantization_config(recipe: Recipe) -> dict[str, Any]:
    group = recipe.group or -1
    if recipe.method == "compressed-tensors":
        more = {key: value for key, value in recipe.more.items() if key != "format"}
        strategy = "group" if recipe.group else "channel"
        weights = {"num_bits": recipe.bits, "type": "int", "symmetric": recipe.symmetric, "strategy": strategy}
        weights |= {"group_size": recipe.group, "dynamic": False} | more
        groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
        return {"quant_method": recipe.method, "format": recipe.more["format"], "config_groups": groups, "ignore": ["lm_head"]}
    own: dict[str, dict[str, Any]] = {
        "gptq": {"bits": recipe.bits, "group_size": group, "desc_act": recipe.act_order, "sym": recipe.symmetric},
        "awq": {"bits": recipe.bits, "group_size": group, "zero_point": True, "version": "gemm"},
        "fp8": {"activation_scheme": "dynamic"},
        "bitnet": {},
    }
    return {"quant_method": recipe.method, **own[recipe.method], **recipe.more}


def write_published(directory: Path, source: Path, recipe: Recipe) -> Published:
    quantized: Tensors = {}
    floats: Tensors = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            quantized[name] = floats[name] = tensor
            continue
        weight_OI = tensor.numpy().copy()
        weight_OI[::3, :128] = np.abs(weight_OI[::3, :128])  # groups of which the zero point is 0, and others
        tensors, numbers = WRITERS[recipe.method](name.removesuffix(".weight"), weight_OI, recipe)
        quantized |= tensors
        floats[name] = numbers.float()
    published = Published(directory / "quantized", directory / "floats")
    for path, tensors in ((published.directory, quantized), (published.floats, floats)):
        path.mkdir()
        save_file({name: each.contiguous() for name, each in tensors.items()}, path / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    (published.floats / "config.json").write_text(json.dumps(config))
    (published.directory / "config.json").write_text(json.dumps(config | {"quantization_config": quantization_config(recipe)}))
    return published


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Writes a model of floats with transformers: `source("llama")`."""

    @cache
    def write(model_type: str) -> Path:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from transformers import CONFIG_MAPPING, AutoModelForCausalLM, logging

            logging.set_verbosity_error()
            logging.disable_progress_bar()
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(
                CONFIG_MAPPING[model_type](**{**SIZES, **MORE.get(model_type, {})})
            ).float()
        with torch.no_grad():  # the default initialization is so small that a wrong layer would hide in the tolerance
            for name, parameter in model.named_parameters():
                parameter.add_(torch.randn_like(parameter) * (0.1 if "norm" in name or "bias" in name else 0.06))
        model_dir = tmp_path_factory.mktemp(model_type)
        model.save_pretrained(model_dir)
        return model_dir

    return write


@pytest.fixture(scope="session")
def published(source: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Published]:
    """Quantizes a model: `published(Recipe("gptq"), "llama")`, once each."""
    made: dict[str, Published] = {}

    def write(recipe: Recipe, model_type: str = "llama") -> Published:
        key = f"{recipe} {model_type}"
        if key not in made:
            made[key] = write_published(tmp_path_factory.mktemp(recipe.method), source(model_type), recipe)
        return made[key]

    return write


@pytest.fixture
def broken(published: Callable[..., Published], tmp_path: Path) -> Callable[..., Path]:
    """Copies a quantized model with other tensors and settings: `broken(recipe, change, **settings)`. None removes one."""

    def write(recipe: Recipe, change: Callable[[Tensors], object] = lambda tensors: None, **settings: Any) -> Path:
        directory = Path(shutil.copytree(published(recipe).directory, tmp_path / "broken"))
        change(tensors := load_file(directory / "model.safetensors"))
        save_file({name: each.contiguous() for name, each in tensors.items()}, directory / "model.safetensors")
        config = json.loads((directory / "config.json").read_text())
        config["quantization_config"] = {
            key: value for key, value in (config["quantization_config"] | settings).items() if value is not None
        }
        (directory / "config.json").write_text(json.dumps(config))
        return directory

    return write


@pytest.fixture(scope="session")
def recipe() -> type[Recipe]:
    return Recipe
