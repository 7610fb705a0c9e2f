"""A node that serves a model from a GGUF file, as a process."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ryzanstein.errors import RyzansteinError
from ryzanstein.generation.prompts import TextPrompt
from ryzanstein.v1 import worker_pb2 as pb
from ryzanstein.worker.config import WorkerSettings
from ryzanstein.worker.sizing import need_of
from ryzanstein.worker.text.tokenizer import TextModel

pytestmark = pytest.mark.cluster
NUM_TOKENS = 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model as a directory, and as files in floats and in blocks."""
    root = tmp_path_factory.mktemp("gguf")
    make = [sys.executable, "-m", "ryzanstein.tools.synthesize.command", str(root / "small"), "--preset", "S"]
    subprocess.run(make, check=True, capture_output=True, timeout=60)
    for kind in ("f32", "q8_0"):
        convert = [
            "ryzanstein.tools.convert.command",
            str(root / "small"),
            str(root / f"small-{kind}.gguf"),
            "--type",
            kind,
        ]
        subprocess.run([sys.executable, "-m", *convert], check=True, capture_output=True, timeout=60)
    return root


def asked(attempt: Any, model: str, **more: Any) -> Any:
    each = attempt(prompt=TextPrompt("hello world, hello"), max_tokens=NUM_TOKENS, ignore_eos=True, temperature=1.0, **more)
    return replace(each, request=replace(each.request, model=model))


def scored(stream: Any) -> list[tuple[int, float]]:
    """Tokens and their log probabilities."""
    assert stream.failed is None
    return [(token, stream.logprobs[0, index].logprob) for index, token, _ in stream.rows[0]]


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.long
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
    assert (answer.failed, answer.indices()) == (None, list(range(NUM_TOKENS)))
    settings = WorkerSettings(tp=2)
    assert need_of(path, settings) < need_of(folder / "small-f32.gguf", settings)


@pytest.mark.long
async def test_a_file_beside_another_model_answers_as_alone_and_so_does_the_other(
    folder: Path, start_node: Any, connect: Any, attempt: Any
) -> None:
    """Each has ranks of its own on the node, and both compute at once; log probabilities are compared bit for bit."""
    paths = (folder / "small-q8_0.gguf", folder / "small")
    alone = [start_node(model=path, tp=1) for path in paths]
    both = start_node("--more-models", str(paths[1]), model=paths[0], tp=1)
    async with AsyncExitStack() as stack:

        async def ready(node: Any, model: str = "") -> Any:
            link = await stack.enter_async_context(connect(node.address, model=model))
            await link.until(lambda: link.beats and link.beats[-1][1].state == pb.NODE_STATE_READY, 60)
            return link

        expected = []
        for path, node in zip(paths, alone, strict=True):
            stream = await (await ready(node)).run(asked(attempt, path.stem, logprobs=2))
            expected.append(scored(stream))
        links = [await ready(both), await ready(both, paths[1].stem)]
        streams = (link.run(asked(attempt, path.stem, logprobs=2)) for link, path in zip(links, paths, strict=True))
        found = [scored(stream) for stream in await asyncio.gather(*streams)]
    assert found == expected
    assert [len(tokens) for tokens in found] == [NUM_TOKENS, NUM_TOKENS]
    assert found[0] != found[1], "blocks have other numbers than floats"


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
