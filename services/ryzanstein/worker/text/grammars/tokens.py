"""A model's table of tokens, from its tokenizer."""

from __future__ import annotations

from ryzanstein.worker.constraints.table import TokenTable
from ryzanstein.worker.text.tokenizer import TextModel


def token_table(model: TextModel) -> TokenTable:
    """Returns what each token adds to a text as the detokenizer writes it; of special ones, their names.

    Control tokens that only a template may write count as special. Takes about a
    second for 256 k tokens.
    """
    tokens = model.all_text_bytes()
    special = [
        token_id for token_id in range(model.vocab_size) if model.is_control(token_id) or token_id in model.eos_token_ids
    ]
    for token_id in special:
        tokens[token_id] = model.token_text(token_id).encode("utf-8", "replace")
    return TokenTable(tokens, special, sorted(model.eos_token_ids))
