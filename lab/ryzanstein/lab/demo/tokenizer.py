"""Builds the demo model's tokenizer: byte-level BPE in which every number up to 200 is one token.

It reproduces any text exactly. Merges of digits are fixed rather than learned: with one token per
number, counting is a step from token to token, and a count of a hundred takes a hundred tokens.
"""

import json
import re
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

USER, ASSISTANT, SYSTEM, END, PAD = "<|user|>", "<|assistant|>", "<|system|>", "<|end|>", "<|pad|>"
SPECIAL_TOKENS = (END, PAD, SYSTEM, USER, ASSISTANT)
VOCAB_SIZE = 1024
MAX_POSITIONS = 2048

PIECES = r" ?\p{L}+| ?(?:1\d\d|200)(?!\d)| ?\d{1,2}| ?[^\s\p{L}\d]+|\s+(?!\S)|\s+"
"""A piece is a word, a number or punctuation with the space before it; no merge crosses two pieces.

Numbers above 200 are split from the left, so that a copy without the space before it has the same
digits per token.
"""

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['role'] in ['system', 'user', 'assistant'] -%}"
    "{{- '<|' + message['role'] + '|>' + message['content'] | trim + '<|end|>' -}}"
    "{%- else -%}"
    "{{- raise_exception('unknown role: ' + message['role']) -}}"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)


def build_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """Returns a tokenizer with digit merges, then as many learned merges as fit the vocabulary."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = _number_merges()
    tokens = [*alphabet, *(left + right for left, right in merges)]
    for left, right in _learned_merges(texts):
        if len(tokens) + len(SPECIAL_TOKENS) == VOCAB_SIZE:
            break
        tokens.append(left + right)
        merges.append((left, right))
    vocab = {token: index for index, token in enumerate((*SPECIAL_TOKENS, *tokens))}
    return _tokenizer(models.BPE(vocab=vocab, merges=merges))


def save_tokenizer(tokenizer: Tokenizer, directory: Path) -> None:
    """Writes tokenizer.json, and tokenizer_config.json with the chat template."""
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": MAX_POSITIONS,
        "bos_token": None,
        "eos_token": END,
        "pad_token": PAD,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def _tokenizer(model: models.BPE) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return tokenizer


def _number_merges() -> list[tuple[str, str]]:
    """Returns merges that make one token of 0 to 200, with and without a space before.

    Ġ is the byte-level space.
    """
    numbers = [str(number) for number in range(201)]
    spaced = [("Ġ" + number[:-1], number[-1]) for number in numbers]
    bare = [(number[:-1], number[-1]) for number in numbers if len(number) > 1]
    return spaced + bare


def _learned_merges(texts: Iterable[str]) -> list[tuple[str, str]]:
    tokenizer = _tokenizer(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=12,
        show_progress=False,
    )
    tokenizer.train_from_iterator((re.sub(r" ?\d+", "", text) for text in texts), trainer)
    learned = json.loads(tokenizer.to_str())["model"]["merges"]
    return [(left, right) for left, right in learned]
