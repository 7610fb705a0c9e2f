"""A trained chat model, SmolLM2 135M, which llama.cpp quantized: its tokens and logits, and its answer by its own template."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.worker.model.gguf.test_tokenizers import nasty
from tests.worker.model.rank_processes import answers_of_ranks
from tokenizers import Tokenizer

from ryzanstein.generation.request import SamplingParams
from ryzanstein.tools.convert.to_checkpoint import to_directory
from ryzanstein.worker.engine.plan import SampleRow, StepPlan
from ryzanstein.worker.kernels.functions import block_types

pytestmark = pytest.mark.timeout(600)
GREEDY = SampleRow(SamplingParams(temperature=0), 0, 0, (), ())
TEXT = (Path(__file__).parents[5] / "docs" / "concepts" / "routing.md").read_text()
ASKED = "<|im_start|>user\nName three rivers of Europe.<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def converted(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model_dir = tmp_path_factory.mktemp("converted") / "smollm2"
    to_directory(smollm2, model_dir, block_types.F32, io.StringIO())
    return model_dir


@pytest.fixture(scope="module")
def tokenizer(converted: Path) -> Tokenizer:
    return Tokenizer.from_file(str(converted / "tokenizer.json"))


def test_token_ids_of_nasty_texts_are_llama_cpps(smollm2: Path, tokenizer: Tokenizer, llama_cpp: Callable[..., Any]) -> None:
    texts = [*nasty(1000), TEXT]
    found = llama_cpp(smollm2, texts=texts).texts
    assert [text for text, ids in zip(texts, found, strict=True) if tokenizer.encode(text).ids != ids] == []


def test_our_engine_writes_what_transformers_writes(
    converted: Path, tokenizer: Tokenizer, reference: Callable[[Path], Any], runner: Callable[..., Any], sequences: type
) -> None:
    prompt = list(tokenizer.encode(ASKED, add_special_tokens=False).ids)
    books = sequences(runner(converted, num_blocks=64, max_tokens_per_step=512), [list(range(40))])
    books.start([prompt])
    for _ in range(64):
        books.step(books.rest(), [GREEDY])
    assert books.ids[0][len(prompt) :] == reference(converted).greedy(prompt, 64)


@pytest.fixture(scope="module")
def judged(converted: Path, tokenizer: Tokenizer, reference: Callable[[Path], Any]) -> tuple[list[int], torch.Tensor]:
    """Token ids [T], and transformers' log probabilities [T, V] with float32 weights."""
    ids = list(tokenizer.encode(TEXT).ids[:400])
    return ids, torch.log_softmax(reference(converted).logits(ids), -1)


def test_the_file_as_it_is_is_as_near_as_llama_cpp(
    smollm2: Path,
    judged: tuple[list[int], torch.Tensor],
    runner: Callable[..., Any],
    sequences: type,
    llama_cpp: Callable[..., Any],
) -> None:
    """Both round inputs to 8 bits: the divergence from float32 weights and inputs is of one size, over one text."""
    ids, expected = judged
    theirs = torch.log_softmax(llama_cpp(smollm2, ids=ids).logits, -1)
    books = sequences(runner(smollm2, num_blocks=128, max_tokens_per_step=512), [list(range(120))])
    rows = []
    for place in range(100, 400, 20):
        books.start([ids[:place]])
        rows.append((place, torch.log_softmax(books.runner.hidden_logits(books.plan(books.rest())).float()[-1], -1)))
        books = sequences(books.runner, [list(range(120))])
    ours_off = torch.stack([_divergence(expected[place - 1], row) for place, row in rows]).mean()
    theirs_off = torch.stack([_divergence(expected[place - 1], theirs[place - 1]) for place, _ in rows]).mean()
    assert ours_off < 0.05
    assert ours_off < 2 * theirs_off + 0.005


def _divergence(expected: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    return (expected.exp() * (expected - found)).sum()


def test_two_ranks_share_nine_heads(
    smollm2: Path, judged: tuple[list[int], torch.Tensor], runner: Callable[..., Any], tmp_path: Path
) -> None:
    """The first rank has six of them, the second three; columns stay whole blocks of 32."""
    ids = judged[0][:300]
    plan = StepPlan(1, ids, [len(ids)], [0], [list(range(20))], [0], full_logits=True)
    options = {"num_blocks": 32, "block_size": 16, "num_threads": 1, "max_tokens_per_step": 512}
    expected = torch.log_softmax(runner(smollm2, **options).hidden_logits(plan).float()[-1], -1)
    answer = answers_of_ranks(tmp_path, 2, [(smollm2, options, [plan])])[0]["jobs"][0]
    found = torch.log_softmax(answer["answers"][0].float()[-1], -1)
    assert _divergence(expected, found) < 0.02
    assert int(found.argmax()) == int(expected.argmax())
