from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from ryzanstein.demo import MODEL_DIR
from ryzanstein.tools.convert.from_checkpoint import WRITTEN, to_file
from ryzanstein.tools.synthesize.command import Recipe, synthesize
from ryzanstein.tools.synthesize.shapes import ModelShape
from ryzanstein.worker.kernels.opening import open_kernels
from ryzanstein.worker.settings.options import RunnerOptions


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama whose tokenizer GGUF has a name for."""
    model_dir = tmp_path_factory.mktemp("models") / "small"
    synthesize(model_dir, Recipe("llama", ModelShape(64, 2, 4, 2, 96, 320, 512), "float32", seed=0, num_files=1))
    return model_dir


@pytest.fixture(scope="session")
def small_q8_0(small: Path) -> Path:
    path = small.with_name("small-q8_0.gguf")
    to_file(small, path, WRITTEN["q8_0"], io.StringIO())
    return path


@pytest.fixture(scope="session")
def demo_tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))


@pytest.fixture
def native_only() -> None:
    """Skips where our own kernels are not available: only they promise the same bits."""
    if (why := open_kernels(RunnerOptions()).reason) != "":
        pytest.skip(why)
