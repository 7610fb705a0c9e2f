"""Pass keys: a number that stands somewhere in a long text, and is asked for at its end.

The text is the user's, or the licences; the key is drawn from the place.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from tokenizers import Tokenizer

from ryzanstein import errors
from ryzanstein.lab.bench.kv.sequence import KvSequence

DEPTHS = (0.1, 0.5, 0.9)
_NEW_TOKENS = 12


def pass_key_prompt(tokenizer: Tokenizer, text_ids: Sequence[int], length: int, depth: float) -> tuple[list[int], str]:
    """Returns a prompt of `length` tokens, and the key that should follow."""
    key = str(random.Random(f"{length} {depth}").randrange(10_000, 100_000))
    needle = tokenizer.encode(
        f"\n\nThe pass key is {key}. Remember it. {key} is the pass key.\n\n", add_special_tokens=False
    ).ids
    question = tokenizer.encode("\n\nWhat is the pass key? The pass key is", add_special_tokens=False).ids
    prefix, around = list(text_ids[:1]), length - len(needle) - len(question) - 1
    if around < 1:
        raise errors.invalid("pass-keys", f"must be at least {length - around + 1} tokens", length)
    before = int(around * depth)
    text = list(text_ids[1 : 1 + around])
    return [*prefix, *text[:before], *needle, *text[before:], *question], key


def says_key(tokenizer: Tokenizer, sequence: KvSequence, prompt: Sequence[int], key: str, at_once: int) -> bool:
    """Returns whether the key is in the greedy answer."""
    sequence.restart()
    for start in range(0, len(prompt), at_once):
        logits_RV = sequence.feed(prompt[start : start + at_once])
    answer: list[int] = []
    for _ in range(_NEW_TOKENS):
        answer.append(int(logits_RV[0].argmax()))
        logits_RV = sequence.feed(answer[-1:])
    return key in tokenizer.decode(answer)
