"""A real model through the conversion: Gemma 3 270M, which llama.cpp quantized, beyond its window of 512 tokens."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.worker.model.gguf.test_tokenizers import nasty
from tokenizers import Tokenizer

from ryzanstein.generation.request import SamplingParams
from ryzanstein.tools.convert.from_checkpoint import WRITTEN, to_file
from ryzanstein.tools.convert.to_checkpoint import to_directory
from ryzanstein.worker.engine.plan import SampleRow
from ryzanstein.worker.kernels.functions import block_types

pytestmark = pytest.mark.timeout(600)
NUM_TOKENS = 700
GREEDY = SampleRow(SamplingParams(temperature=0), 0, 0, (), ())
PLACES = (1, 100, 511, 512, 513, 600, NUM_TOKENS)
TEXT = (Path(__file__).parents[5] / "docs" / "concepts" / "routing.md").read_text()


@pytest.fixture(scope="module")
def converted(gemma_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model_dir = tmp_path_factory.mktemp("converted") / "gemma"
    to_directory(gemma_file, model_dir, block_types.F32, io.StringIO())
    return model_dir


@pytest.fixture(scope="module")
def tokenizer(converted: Path) -> Tokenizer:
    return Tokenizer.from_file(str(converted / "tokenizer.json"))


@pytest.fixture(scope="module")
def ids(tokenizer: Tokenizer) -> list[int]:
    return list(tokenizer.encode(TEXT).ids[:NUM_TOKENS])


@pytest.fixture(scope="module")
def expected(converted: Path, ids: list[int], reference: Callable[[Path], Any]) -> torch.Tensor:
    """transformers' log probabilities [T, V]."""
    return torch.log_softmax(reference(converted).logits(ids), -1)


def surprise(log_probs: torch.Tensor, ids: list[int]) -> float:
    targets = torch.tensor(ids[1:])
    return -float(log_probs[torch.arange(len(targets)), targets].mean())


def divergence(expected: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    return (expected.exp() * (expected - found)).sum(-1)


def test_token_ids_of_nasty_texts_are_llama_cpps(gemma_file: Path, tokenizer: Tokenizer, llama_cpp: Callable[..., Any]) -> None:
    texts = [*nasty(1000), TEXT]
    found = llama_cpp(gemma_file, texts=texts).texts
    assert [text for text, ids in zip(texts, found, strict=True) if tokenizer.encode(text).ids != ids] == []


def test_our_engine_agrees_with_transformers(
    converted: Path, ids: list[int], expected: torch.Tensor, runner: Callable[..., Any], sequences: type
) -> None:
    books = sequences(runner(converted, num_blocks=256, max_tokens_per_step=NUM_TOKENS), [list(range(200))])
    fed = 0
    for place in PLACES:
        books.start([ids[:place]])
        books.fed = [fed]
        found = torch.log_softmax(books.runner.hidden_logits(books.plan({0: place - fed})).float()[0], -1)
        assert (found - expected[place - 1]).abs().max() < 2e-3, place
        assert found.argmax() == expected[place - 1].argmax()
        fed = place


def test_our_engine_writes_what_transformers_writes(
    converted: Path, ids: list[int], reference: Callable[[Path], Any], runner: Callable[..., Any], sequences: type
) -> None:
    prompt = ids[:600]
    books = sequences(runner(converted, num_blocks=256, max_tokens_per_step=NUM_TOKENS), [list(range(200))])
    books.start([prompt])
    for _ in range(32):
        books.step(books.rest(), [GREEDY])
    assert books.ids[0][600:] == reference(converted).greedy(prompt, 32)


def test_llama_cpp_agrees_on_the_float32_file_that_we_write(
    converted: Path, ids: list[int], expected: torch.Tensor, tmp_path: Path, llama_cpp: Callable[..., Any]
) -> None:
    to_file(converted, tmp_path / "again.gguf", WRITTEN["f32"], io.StringIO())
    found = torch.log_softmax(llama_cpp(tmp_path / "again.gguf", ids=ids).logits, -1)
    assert divergence(expected, found).max() < 1e-3
    assert (found.argmax(-1) == expected.argmax(-1)).float().mean() > 0.99


def test_llama_cpp_on_its_own_file_is_within_quantized_arithmetic(
    gemma_file: Path, ids: list[int], expected: torch.Tensor, llama_cpp: Callable[..., Any]
) -> None:
    """It rounds inputs to 8 bits, which we do not: that is the difference."""
    found = torch.log_softmax(llama_cpp(gemma_file, ids=ids).logits, -1)
    assert divergence(expected, found).mean() < 0.02
    assert abs(surprise(found, ids) - surprise(expected, ids)) < 0.03


MOST = {"q8_0": 0.03, "q4_k": 0.15}


@pytest.mark.parametrize("kind", MOST)
def test_llama_cpp_reads_what_we_quantize(
    kind: str, converted: Path, expected: torch.Tensor, tmp_path: Path, llama_cpp: Callable[..., Any]
) -> None:
    to_file(converted, tmp_path / "again.gguf", WRITTEN[kind], io.StringIO())
    tokens = Tokenizer.from_file(str(converted / "tokenizer.json")).encode(TEXT).ids[:NUM_TOKENS]
    found = torch.log_softmax(llama_cpp(tmp_path / "again.gguf", ids=tokens).logits, -1)
    assert divergence(expected, found).mean() < MOST[kind]
