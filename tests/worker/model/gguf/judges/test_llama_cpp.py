"""llama.cpp reads what we write: the same logits for every architecture, the same token ids for every splitting."""

import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.worker.model.gguf import test_architectures, test_tokenizers
from tokenizers import Tokenizer

from ryzanstein.worker.checkpoints.gguf.tokenizer.splitting import SPLITTINGS

corpus, with_tokenizer = test_tokenizers.corpus, test_tokenizers.with_tokenizer
MARKS_DIFFER = ("tekken", "gpt-4o")
"""The patterns of these tokenizers count marks as letters; llama.cpp's version of them does not."""

WIDE_BLANKS_DIFFER = ("deepseek-llm", "deepseek-coder")
"""The classes of these patterns hold U+3000, which is also a blank. llama.cpp compares blanks beyond ASCII as U+000B."""


@pytest.mark.parametrize("name", test_architectures.MODELS)
def test_the_logits_are_those_of_transformers(
    name: str, tiny: Callable[..., Path], to_gguf: Callable[..., Path], llama_cpp: Callable[..., Any]
) -> None:
    """llama.cpp keeps keys and values as 16-bit floats: that is the tolerance.

    It truncates the ramp of YaRN, which gpt-oss does not: on these weights that is a difference of 0.7 %.
    Gemma 4 does not scale down its scores, so these floats matter more.
    """
    model_type, changes = test_architectures.MODELS[name]
    if name == "gpt_oss":
        changes = {**changes, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    model_dir = tiny(model_type, **changes)
    expected = test_architectures.logits(model_dir)
    found = llama_cpp(to_gguf(model_dir), ids=test_architectures.IDS[0].tolist()).logits
    assert (found - expected).abs().max() < (1e-2 if model_type == "gemma4_text" else 2e-3) * expected.abs().max()


def test_internlm2_is_what_llama_cpp_takes_it_for(
    tiny: Callable[..., Path], to_gguf: Callable[..., Path], llama_cpp: Callable[..., Any]
) -> None:
    llama = tiny("llama")
    expected = test_architectures.logits(llama)
    found = llama_cpp(to_gguf(test_architectures.as_internlm2(llama)), ids=test_architectures.IDS[0].tolist()).logits
    assert (found - expected).abs().max() < 2e-3 * expected.abs().max()


EXPERTS = {
    "qwen3_moe": {"num_experts": 3, "num_experts_per_tok": 3, "moe_intermediate_size": 256, "norm_topk_prob": True},
    "gpt2": {"n_embd": 256, "n_layer": 2, "n_head": 4, "n_positions": 512, "n_inner": 512},
}


@pytest.mark.parametrize("kind", ["q8_0", "q4_k"])
@pytest.mark.parametrize("model_type", EXPERTS)
def test_stacked_and_transposed_matrices_are_read_in_blocks(
    kind: str, model_type: str, tiny: Callable[..., Path], conversions: Any, llama_cpp: Callable[..., Any]
) -> None:
    to_gguf, from_gguf = conversions
    path = to_gguf(tiny(model_type, hidden_size=256, intermediate_size=512, **EXPERTS[model_type]), kind)
    expected = test_architectures.logits(from_gguf(path))
    found = llama_cpp(path, ids=test_architectures.IDS[0].tolist()).logits
    assert (found - expected).abs().mean() < 0.1 * expected.abs().mean()


@pytest.fixture
def conversions(
    to_gguf: Callable[..., Path], from_gguf: Callable[..., Path]
) -> tuple[Callable[..., Path], Callable[..., Path]]:
    return to_gguf, from_gguf


@pytest.mark.parametrize("kind", ["f16", "bf16", "q8_0", "q4_0", "q4_k", "q6_k"])
def test_every_type_that_we_write_is_read(
    kind: str, tiny: Callable[..., Path], to_gguf: Callable[..., Path], from_gguf: Callable[..., Path], llama_cpp: Any
) -> None:
    """Compared with the same file read by us. llama.cpp rounds inputs to 8 bits: 4 to 6 % on these random weights."""
    path = to_gguf(tiny("qwen2", hidden_size=256, intermediate_size=512), kind)
    expected = test_architectures.logits(from_gguf(path))
    found = llama_cpp(path, ids=test_architectures.IDS[0].tolist()).logits
    assert (found - expected).abs().mean() < 0.1 * expected.abs().mean()


@pytest.mark.parametrize("name", SPLITTINGS)
def test_token_ids_of_byte_pairs_are_equal(
    name: str, corpus: list[str], with_tokenizer: Any, to_gguf: Callable[..., Path], llama_cpp: Callable[..., Any]
) -> None:
    tokenizer: Tokenizer = test_tokenizers.byte_level(name, corpus)
    texts = [text for text in test_tokenizers.nasty(1000) if _comparable(text, name)]
    assert len(texts) > 500
    found = llama_cpp(to_gguf(with_tokenizer(tokenizer)), texts=texts).texts
    assert [text for text, ids in zip(texts, found, strict=True) if tokenizer.encode(text).ids != ids] == []


@pytest.mark.parametrize("prefix", [True, False])
def test_token_ids_of_sentencepiece_are_equal(
    prefix: bool, corpus: list[str], with_tokenizer: Any, to_gguf: Callable[..., Path], llama_cpp: Callable[..., Any]
) -> None:
    tokenizer = test_tokenizers.sentencepiece(corpus, prefix=prefix)
    texts = test_tokenizers.nasty(1000)
    path = to_gguf(with_tokenizer(tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"))
    found = llama_cpp(path, texts=texts).texts
    assert [text for text, ids in zip(texts, found, strict=True) if tokenizer.encode(text).ids != ids] == []


def test_token_ids_of_listed_merges_are_equal(
    corpus: list[str], with_tokenizer: Any, to_gguf: Callable[..., Path], llama_cpp: Callable[..., Any]
) -> None:
    """llama.cpp splits texts at newlines first, which these merges do not."""
    tokenizer = test_tokenizers.sentencepiece(corpus, prefix=False)
    texts = [text for text in test_tokenizers.nasty(1000) if "\n" not in text]
    path = to_gguf(with_tokenizer(tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"))
    found = llama_cpp(test_tokenizers.spaced(tokenizer, path), texts=texts).texts
    assert [text for text, ids in zip(texts, found, strict=True) if tokenizer.encode(text).ids != ids] == []


def _comparable(text: str, name: str) -> bool:
    """Returns whether both know the text's letters (not those that a Unicode version added) and treat them alike.

    Texts in NFC only, where the tokenizer normalizes: llama.cpp does not. Special tokens are read
    in a text by tokenizers, not by the judge.
    """
    if any(unicodedata.category(letter) == "Cn" for letter in text) or "<|end|>" in text:
        return False
    if name in MARKS_DIFFER and any(unicodedata.category(letter).startswith("M") for letter in text):
        return False
    if name in WIDE_BLANKS_DIFFER and "\u3000" in text:
        return False
    return not SPLITTINGS[name].normalized or unicodedata.is_normalized("NFC", text)
