"""Writes a random checkpoint of any size in the Hugging Face layout, for benchmarks and load tests.

    python -P -m ryzanstein.tools.synthesize.command DIR --preset S | --arch llama --params 1.1B

The same arguments give the same bytes. Weights are generated and written file by file: with enough
files a model may be larger than the memory.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from ryzanstein.tools.atomic import new_directory
from ryzanstein.tools.synthesize.shapes import PRESETS, ModelShape, shape_of
from ryzanstein.tools.synthesize.tokenizer import write_tokenizer
from ryzanstein.worker.architectures.registry import spec_of
from ryzanstein.worker.model.listing import tensor_shapes
from ryzanstein.worker.refusal import ModelRefused
from ryzanstein.worker.settings.options import DTYPES

_STD = 0.02
_WRITTEN = ("llama",)  # ModelShape lacks numbers that other architectures need


@dataclass(frozen=True, slots=True)
class Recipe:
    """A description of the checkpoint to write: `num_files` weight files of about equal size."""

    arch: str
    shape: ModelShape
    dtype: str
    seed: int
    num_files: int


def synthesize(model_dir: Path, recipe: Recipe) -> int:
    """Writes the checkpoint into a directory and returns its number of parameters. Overwrites files of its names."""
    model_dir.mkdir(parents=True, exist_ok=True)
    config = _config(recipe)
    (model_dir / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    write_tokenizer(model_dir, recipe.shape.vocab_size, recipe.shape.context_length)
    shapes = tensor_shapes(spec_of(config))
    _write_weights(model_dir, shapes, recipe)
    return sum(map(math.prod, shapes.values()))


def _config(recipe: Recipe) -> dict[str, Any]:
    shape = recipe.shape
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": recipe.arch,
        "hidden_size": shape.hidden_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.hidden_size // shape.num_heads,
        "intermediate_size": shape.intermediate_size,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.context_length,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "initializer_range": _STD,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "torch_dtype": recipe.dtype,
    }


def _write_weights(model_dir: Path, shapes: Mapping[str, tuple[int, ...]], recipe: Recipe) -> None:
    files = list(_files(shapes, recipe.num_files))
    weight_map = {}
    for number, names in enumerate(files, start=1):
        file = f"model-{number:05d}-of-{len(files):05d}.safetensors" if len(files) > 1 else "model.safetensors"
        save_file({name: _random(name, shapes[name], recipe) for name in names}, model_dir / file, {"format": "pt"})
        weight_map.update(dict.fromkeys(names, file))
    total_bytes = sum(map(math.prod, shapes.values())) * DTYPES[recipe.dtype].itemsize
    if len(files) > 1:
        index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
        (model_dir / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _files(shapes: Mapping[str, tuple[int, ...]], num_files: int) -> Iterator[Sequence[str]]:
    """Yields the names of each file's tensors, in order; a file ends when its share is full."""
    share = sum(map(math.prod, shapes.values())) / num_files
    names: list[str] = []
    written = 0
    for name, shape in shapes.items():
        names.append(name)
        written += math.prod(shape)
        if written >= share:
            yield names
            names, written = [], 0
    if names:
        yield names


def _random(name: str, shape: tuple[int, ...], recipe: Recipe) -> Tensor:
    """Returns ones for norms and normal numbers for the rest.

    Each tensor has a generator of its own, so that its bits do not depend on the tensors before it.
    """
    if len(shape) == 1:
        return torch.ones(shape, dtype=DTYPES[recipe.dtype])
    generator = torch.Generator().manual_seed(zlib.crc32(f"{recipe.seed} {name}".encode()))
    return torch.randn(shape, generator=generator).mul_(_STD).to(DTYPES[recipe.dtype])


def main(
    model_dir: Annotated[Path, typer.Argument(help="Directory to write; created if missing.")],
    *,
    preset: Annotated[str | None, typer.Option(help=f"A fixed shape: {', '.join(PRESETS)}.")] = None,
    arch: Annotated[str, typer.Option(help=f"Architecture: {', '.join(_WRITTEN)}.")] = "llama",
    params: Annotated[str | None, typer.Option(help="Number of parameters, as 25M or 1.1B; a common shape is chosen.")] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**31 - 1)] = 0,
    dtype: Annotated[str, typer.Option(help=f"auto (float32 below 100M parameters) or {', '.join(DTYPES)}.")] = "auto",
    shards: Annotated[int, typer.Option(min=1, max=1000, help="Number of weight files.")] = 1,
    force: Annotated[bool, typer.Option("--force", help="Replace what an earlier call wrote there.")] = False,
) -> None:
    """Write a random checkpoint in the Hugging Face layout."""
    if (preset is None) == (params is None):
        raise typer.BadParameter("specify exactly one of --preset and --params")
    if arch not in _WRITTEN:
        raise typer.BadParameter(f"--arch {arch!r} is not supported, only {', '.join(_WRITTEN)}")
    try:
        shape = shape_of(preset, params)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    chosen = ("float32" if shape.num_parameters < 100e6 else "bfloat16") if dtype == "auto" else dtype
    if chosen not in DTYPES:
        raise typer.BadParameter(f"--dtype {dtype!r} is not supported, only auto, {', '.join(DTYPES)}")
    try:
        model_dir.parent.mkdir(parents=True, exist_ok=True)
        with new_directory(model_dir, force=force) as directory:
            num_parameters = synthesize(directory, Recipe(arch, shape, chosen, seed, shards))
    except (ModelRefused, OSError, SafetensorError) as refusal:
        typer.echo(f"{model_dir}: {refusal}" if isinstance(refusal, SafetensorError) else str(refusal), err=True)
        raise typer.Exit(1) from None
    typer.echo(f"{model_dir}: {num_parameters / 1e6:.1f}M parameters, {chosen}, {shape}")


if __name__ == "__main__":
    typer.run(main)
