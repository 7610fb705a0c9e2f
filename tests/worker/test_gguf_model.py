"""A node that serves a model from a GGUF file, as a process."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ryzanstein.errors import RyzansteinError
from ryzanstein.generation import TextPrompt
from ryzanstein.worker.config import WorkerSettings
from ryzanstein.worker.sizing import need_of
from ryzanstein.worker.text.tokenizer import TextModel

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model as a directory, and as files in floats and in blocks."""
    root = tmp_path_factory.mktemp("gguf")
    make = [sys.executable, "-m", "ryzanstein.worker.model.synthesize", str(root / "small"), "--preset", "S"]
    subprocess.run(make, check=True, capture_output=True, timeout=60)
    for kind in ("f32", "q8_0"):
        convert = [
            "ryzanstein.worker.model.gguf.convert",
            str(root / "small"),
            str(root / f"small-{kind}.gguf"),
            "--type",
            kind,
        ]
        subprocess.run([sys.executable, "-m", *convert], check=True, capture_output=True, timeout=60)
    return root


def asked(attempt: Any, model: str) -> Any:
    each = attempt(prompt=TextPrompt("hello world, hello"), max_tokens=40, ignore_eos=True, temperature=1.0)
    return replace(each, request=replace(each.request, model=model))


@pytest.mark.parametrize("tp", [1, 2])
async def test_a_file_of_floats_answers_as_the_directory_that_it_was_made_from(
    folder: Path, start_node: Any, connect: Any, attempt: Any, tp: int
) -> None:
    answers = []
    for model in (folder / "small", folder / "small-f32.gguf"):
        node = start_node(model=model, tp=tp)
        node.wait_event("ranks ready")
        async with connect(node.address) as link:
            assert link.hello.beat.model == model.stem
            answers.append(await link.run(asked(attempt, model.stem)))
        node.close()
    assert [answer.failed for answer in answers] == [None, None]
    assert answers[0].rows == answers[1].rows
    assert answers[0].prompt_tokens == answers[1].prompt_tokens


async def test_a_file_of_blocks_is_served_and_takes_less_memory(
    folder: Path, start_node: Any, connect: Any, attempt: Any
) -> None:
    path = folder / "small-q8_0.gguf"
    node = start_node(model=path, tp=2)
    node.wait_event("ranks ready")
    async with connect(node.address) as link:
        answer = await link.run(asked(attempt, "small-q8_0"))
    assert (answer.failed, answer.indices()) == (None, list(range(40)))
    settings = WorkerSettings(tp=2)
    assert need_of(path, settings) < need_of(folder / "small-f32.gguf", settings)


def test_the_text_side_of_a_file_is_that_of_the_directory(folder: Path) -> None:
    made, file = TextModel.load(folder / "small"), TextModel.load(folder / "small-q8_0.gguf")
    assert (file.name, file.context_length, file.vocab_size) == ("small-q8_0", made.context_length, made.vocab_size)
    assert file.eos_token_ids == made.eos_token_ids
    for text in ("hello world", " é 中文\n\n\tx", "<|im_end|>1 2 3"):
        assert file.encode(text) == made.encode(text)


def test_a_file_that_is_cut_off_is_refused_by_name_before_a_rank_starts(folder: Path, tmp_path: Path, start_node: Any) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes((folder / "small-q8_0.gguf").read_bytes()[:100_000])
    with pytest.raises(RyzansteinError, match=r"cut\.gguf") as refused:
        TextModel.load(cut)
    assert (refused.value.code.name, refused.value.reason) == ("FAILED_PRECONDITION", "MODEL_INVALID")
    node = start_node(model=cut, tp=1)
    assert node.process.wait(60) == 1
    assert "cut.gguf" in node.log_path.read_text()
