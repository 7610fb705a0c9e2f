"""Model directories with small tokenizers of the families that real models use, trained here on a few sentences."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

CORPUS = [
    "The quick brown fox jumps over the lazy dog. Then, it sleeps; doesn't it?",
    "Zażółć gęślą jaźń. Füße, Straße, œuvre, naïve café. Ωμέγα и мир.",
    "def main():\n    print('hello')\n\treturn 0\n\n\n# 123 456 7890",
    "こんにちは世界 你好 👋🏽 family 👨‍👩‍👧 done",
] * 3
SPECIALS = ["<s>", "</s>", "<unk>", "<|user|>", "<|assistant|>", "<|system|>"]
TEMPLATE = """{{ bos_token }}{% for message in messages %}
{% if message['role'] == 'assistant' and loop.first %}
    {{ raise_exception('the user speaks first') }}
{% endif %}
    {% if message.role != 'system' %}
<|{{ message.role }}|>{{ message.content | trim }}{{ eos_token }}
    {% else %}
<|system|>{{ message.content | tojson }}{{ unknown_variable }}
    {% endif %}
{% endfor %}
{% if add_generation_prompt %}<|assistant|>{% generation %}{% endgeneration %}{% endif %}"""


def byte_level() -> Tokenizer:
    """GPT-2, Llama 3, Qwen."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens(["<tool>", "two words", "ünïcode"])
    return tokenizer


def sentencepiece() -> Tokenizer:
    """Llama 2, Mistral: pieces with a word marker and bytes for what has no piece."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    alphabet = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=SPECIALS + alphabet, limit_alphabet=40, show_progress=False)
    tokenizer.train_from_iterator([line.replace(" ", "▁") for line in CORPUS], trainer)
    state = json.loads(tokenizer.to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if not token["content"].startswith("<0x")]
    tokenizer = Tokenizer.from_str(json.dumps(state))
    tokenizer.add_tokens(["<tool>"])
    return tokenizer


def metaspace() -> Tokenizer:
    """Unigram models such as T5's, with the word marker in pre-tokenizer and decoder."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=150, special_tokens=SPECIALS, unk_token="<unk>", show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


MAKERS = {"byte_level": byte_level, "sentencepiece": sentencepiece, "metaspace": metaspace}


@pytest.fixture(scope="session")
def write_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Writes a model directory without weights. Keyword arguments overwrite entries of the three JSON files; None removes."""
    made: dict[str, Tokenizer] = {}

    def write(kind: str = "byte_level", **files: dict[str, Any]) -> Path:
        if kind not in made:
            made[kind] = MAKERS[kind]()
        tokenizer = made[kind]
        directory = tmp_path_factory.mktemp(kind)
        (directory / "tokenizer.json").write_text(tokenizer.to_str())
        defaults = {
            "config": {
                "model_type": "llama",
                "max_position_embeddings": 512,
                "vocab_size": tokenizer.get_vocab_size() + 5,
                "eos_token_id": tokenizer.token_to_id("</s>"),
            },
            "tokenizer_config": {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": "<s>",
                "eos_token": {"__type": "AddedToken", "content": "</s>", "special": True},
                "unk_token": "<unk>",
                "clean_up_tokenization_spaces": False,
                "chat_template": TEMPLATE,
            },
            "generation_config": {"eos_token_id": [tokenizer.token_to_id("</s>"), tokenizer.token_to_id("<|user|>")]},
        }
        for name, default in defaults.items():
            content = {key: value for key, value in {**default, **files.get(name, {})}.items() if value is not None}
            (directory / f"{name}.json").write_text(json.dumps(content))
        return directory

    return write


@pytest.fixture(scope="session", params=sorted(MAKERS))
def model_dir(request: pytest.FixtureRequest, write_model: Callable[..., Path]) -> Path:
    return write_model(request.param)
