"""Small models to adapt, and data to do it with."""

import json
import random
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from typer import Typer
from typer.testing import CliRunner

from ryzanstein import demo
from ryzanstein.tools.convert.from_checkpoint import WRITTEN, to_file
from ryzanstein.tools.finetune.base.opening import Base
from ryzanstein.tools.quantize.request import Request
from ryzanstein.tools.quantize.run import quantize_model
from ryzanstein.tools.synthesize.command import Recipe, synthesize
from ryzanstein.tools.synthesize.shapes import ModelShape

DEMO = Path(demo.__file__).parent
COMMAND = [sys.executable, "-P", "-m", "ryzanstein.tools.finetune.command"]
NAMES = ("Anna", "Ben", "Cara", "Dan", "Eva", "Finn", "Gina", "Hugo", "Iris", "Jan")
CITIES = ("Rome", "Oslo", "Lima", "Bern", "Kyiv", "Baku", "Doha", "Riga")


@pytest.fixture(autouse=True)
def _plain_warnings() -> Any:
    """transformers and peft warn of names of their own that they will remove."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning)
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        yield


@pytest.fixture(scope="session")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demonstration model with 4 bits of a weight, in groups of 32."""
    path = tmp_path_factory.mktemp("quantized") / "model"
    quantize_model(DEMO, path, Request("rtn", 4, 32), StringIO())
    return path


@pytest.fixture(scope="session")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of random numbers, whose tokenizer a GGUF file can have."""
    path = tmp_path_factory.mktemp("random") / "model"
    synthesize(path, Recipe("llama", ModelShape(256, 2, 4, 2, 512, 512, 256), "float32", 0, 1))
    return path


@pytest.fixture(scope="session")
def gguf(tmp_path_factory: pytest.TempPathFactory, random_model: Path) -> Path:
    """The same as a GGUF file, in Q4_K."""
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    to_file(random_model, path, WRITTEN["q4_k"], StringIO())
    return path


def dequantized(base: Base) -> Any:
    """The floats of the base's blocks, in the plain layers of transformers."""
    from ryzanstein.tools.finetune.base.model import build

    return build(base, floats=True)


def chats(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Conversations in which facts are written in a format."""
    chosen = random.Random(seed)
    found = []
    for _ in range(count):
        name, city = chosen.choice(NAMES), chosen.choice(CITIES)
        asked = {"role": "user", "content": f"{name} lives in {city}."}
        found.append({"messages": [asked, {"role": "assistant", "content": f"City: {city}. Name: {name}."}]})
    return found


@pytest.fixture
def data(tmp_path: Path) -> Callable[..., Path]:
    """Writes objects, one a line."""

    def write(objects: Sequence[Any], name: str = "data.jsonl") -> Path:
        path = tmp_path / name
        path.write_text("".join(json.dumps(each) + "\n" for each in objects))
        return path

    return write


def command(*arguments: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *map(str, arguments)], capture_output=True, text=True, timeout=250, check=False, cwd=cwd)


def called(function: Callable[..., None], *arguments: object) -> Result:
    """A command, in this process."""
    app = Typer()
    app.command()(function)
    return CliRunner().invoke(app, [*map(str, arguments)], env={"COLUMNS": "200"})


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
