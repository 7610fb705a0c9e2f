"""Tiny random models of each architecture, written by transformers, and small GGUF files made by hand."""

import io
import json
import struct
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ryzanstein.tools.convert.from_checkpoint import WRITTEN, to_file
from ryzanstein.tools.convert.to_checkpoint import to_directory
from ryzanstein.tools.synthesize.tokenizer import write_tokenizer
from ryzanstein.worker.kernels.functions import block_types

VOCAB = 320
SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": VOCAB,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def write_model(model_dir: Path, model_type: str, dtype: torch.dtype = torch.float32, **changes: object) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import CONFIG_MAPPING, AutoModelForCausalLM, logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[model_type](**{**SIZES, **changes})).float()
    with torch.no_grad():  # the default initialization is so small that a wrong layer would hide in the tolerance
        for name, parameter in model.named_parameters():
            parameter.add_(torch.randn_like(parameter) * (0.1 if "norm" in name or "bias" in name else 0.08))
    model.to(dtype).save_pretrained(model_dir)
    write_tokenizer(model_dir, VOCAB, SIZES["max_position_embeddings"])  # type: ignore[arg-type]
    return model_dir


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Writes a model and a tokenizer: `tiny("llama", hidden_size=32)`."""

    def write(model_type: str, dtype: torch.dtype = torch.float32, **changes: object) -> Path:
        return write_model(tmp_path_factory.mktemp(model_type) / "model", model_type, dtype, **changes)

    return write


@pytest.fixture
def to_gguf(tmp_path: Path) -> Callable[..., Path]:
    """Converts a directory to a file: `to_gguf(model_dir, "q8_0")`. The notes are in `path.with_suffix(".log")`."""

    def convert(model_dir: Path, kind: str = "f32", name: str = "model.gguf") -> Path:
        out = io.StringIO()
        to_file(model_dir, tmp_path / name, WRITTEN[kind], out, force=True)
        (tmp_path / name).with_suffix(".log").write_text(out.getvalue())
        return tmp_path / name

    return convert


@pytest.fixture
def from_gguf(tmp_path: Path) -> Callable[..., Path]:
    """Converts a file to a directory."""

    def convert(path: Path, dtype: block_types.BlockType = block_types.F32, name: str = "converted") -> Path:
        to_directory(path, tmp_path / name, dtype, io.StringIO(), force=True)
        return tmp_path / name

    return convert


@pytest.fixture(scope="session")
def weights_of() -> Callable[[Path], dict[str, torch.Tensor]]:
    """Reads all tensors of a directory."""

    def read(model_dir: Path) -> dict[str, torch.Tensor]:
        from safetensors.torch import load_file

        return load_file(model_dir / "model.safetensors")

    return read


def raw_string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def raw_entry(key: bytes, kind: int, value: bytes) -> bytes:
    return raw_string(key) + struct.pack("<I", kind) + value


def raw_tensor(name: bytes, dimensions: Sequence[int], kind: int, offset: int) -> bytes:
    packed = struct.pack(f"<I{len(dimensions)}Q", len(dimensions), *dimensions)
    return raw_string(name) + packed + struct.pack("<IQ", kind, offset)


def raw_file(
    entries: Sequence[bytes] = (),
    tensors: Sequence[bytes] = (),
    data: bytes = b"",
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    counts: tuple[int, int] | None = None,
) -> bytes:
    """A file's bytes, whatever they mean; `counts` of tensors and entries may lie."""
    header = magic + struct.pack("<IQQ", version, *(counts or (len(tensors), len(entries)))) + b"".join((*entries, *tensors))
    return header + bytes(-len(header) % 32) + data


@pytest.fixture(scope="session")
def raw() -> Any:
    """The functions that make files by hand, as attributes."""

    class Raw:
        string, entry, tensor, file = map(staticmethod, (raw_string, raw_entry, raw_tensor, raw_file))

    return Raw


@pytest.fixture(scope="session")
def random_blocks() -> Callable[[block_types.BlockType, int], np.ndarray[Any, np.dtype[np.uint8]]]:
    """Random bytes of whole blocks: every bit pattern, so scales may be infinite or NaN as well."""

    def make(kind: block_types.BlockType, count: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        return np.random.default_rng(kind.id).integers(0, 256, (count, kind.num_bytes), dtype=np.uint8)

    return make


@pytest.fixture
def edit_json() -> Callable[..., None]:
    """Changes keys of a JSON file; None removes one."""

    def edit(path: Path, **changes: object) -> None:
        content = json.loads(path.read_text()) | changes
        path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))

    return edit
