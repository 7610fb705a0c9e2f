"""A byte-level tokenizer with a chat template for synthetic checkpoints. It reproduces any text.

Entries 0 to 2 are special. The 256 bytes follow, then as many pairs of bytes as fit the vocabulary.
"""

from __future__ import annotations

import json
from itertools import islice, product
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIAL = ("<pad>", "<s>", "</s>")
_CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'] + ': ' + message['content'] + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


def write_tokenizer(model_dir: Path, vocab_size: int, context_length: int) -> None:
    """Writes tokenizer.json, tokenizer_config.json and generation_config.json.

    Raises ValueError below 259 entries.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    num_pairs = vocab_size - len(SPECIAL) - len(alphabet)
    if num_pairs < 0:
        raise ValueError(f"a byte-level vocabulary has at least {vocab_size - num_pairs} entries, got {vocab_size}")
    merges = list(islice(product(alphabet, alphabet), num_pairs))
    entries = [*SPECIAL, *alphabet, *("".join(pair) for pair in merges)]
    tokenizer = Tokenizer(models.BPE(vocab={entry: i for i, entry in enumerate(entries)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    tokenizer.save(str(model_dir / "tokenizer.json"))
    _write_json(
        model_dir / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": context_length,
            "pad_token": SPECIAL[0],
            "bos_token": SPECIAL[1],
            "eos_token": SPECIAL[2],
            "clean_up_tokenization_spaces": False,
            "chat_template": _CHAT_TEMPLATE,
        },
    )
    _write_json(model_dir / "generation_config.json", {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0})


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
