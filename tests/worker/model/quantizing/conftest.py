"""Tiny random models of several architectures, written by transformers, and texts to calibrate on."""

import io
import json
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer import Typer
from typer.testing import CliRunner

from ryzanstein.tools.quantize.command import quantize
from ryzanstein.tools.quantize.request import Request
from ryzanstein.tools.quantize.run import quantize_model
from ryzanstein.tools.synthesize.tokenizer import write_tokenizer

VOCAB, CONTEXT = 320, 128
SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": VOCAB,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
COMMAND = [sys.executable, "-m", "ryzanstein.tools.quantize.command"]


def write_model(model_dir: Path, model_type: str, dtype: torch.dtype, **changes: object) -> Path:
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
    write_tokenizer(model_dir, VOCAB, CONTEXT)
    return model_dir


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Writes a model with a tokenizer: `tiny("llama", hidden_size=32)`."""

    def write(model_type: str = "llama", dtype: torch.dtype = torch.float32, **changes: object) -> Path:
        return write_model(tmp_path_factory.mktemp(model_type) / "model", model_type, dtype, **changes)

    return write


@pytest.fixture(scope="session")
def llama(tiny: Callable[..., Path]) -> Path:
    """One model for many tests, which only read it."""
    return tiny("llama")


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page of English, repeated with numbers: 4,000 tokens of the tiny models."""
    path = tmp_path_factory.mktemp("texts") / "text.txt"
    path.write_text("".join(f"{i}: the quick brown fox jumps over the lazy dog, {i * 7} times.\n" for i in range(120)))
    return path


@pytest.fixture
def quantized(tmp_path: Path) -> Callable[..., Path]:
    """Quantizes in this process: `quantized(source, method="rtn")`. What was said is in `said.txt` beside the result."""

    @torch.inference_mode()
    def quantize(source: Path, name: str = "quantized", **options: Any) -> Path:
        out = io.StringIO()
        quantize_model(source, tmp_path / name, Request(**options), out)
        (tmp_path / "said.txt").write_text(out.getvalue())
        return tmp_path / name

    return quantize


def run(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """Runs the command, in this process unless there are options for a process of its own."""
    command = [*COMMAND, *map(str, arguments)]
    if not options:
        app = Typer()
        app.command()(quantize)
        with torch.inference_mode():
            result = CliRunner().invoke(app, command[len(COMMAND) :])
        return subprocess.CompletedProcess(command, result.exit_code, result.stdout, result.stderr)
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, **options)


def config_of(model_dir: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((model_dir / "config.json").read_text())
    return content
