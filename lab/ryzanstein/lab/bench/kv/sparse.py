"""Sparse attention beside dense: perplexity, pass keys at ten depths, several keys in one text, time of a new token.

The rules are those of the node's setting `sparse_attention`, in layers that read everything. Each
sequence keeps all pages: what is compared is what is read.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence

import torch
from tokenizers import Tokenizer

from ryzanstein import errors
from ryzanstein.lab.bench.kv.options import KvOption
from ryzanstein.lab.bench.kv.sequence import KvSequence
from ryzanstein.worker.settings.sparse import parse_sparse_attention

DEPTHS = tuple(tenth / 10 + 0.05 for tenth in range(10))
DEFAULT_RULES = "window=512/window=448,sinks=64/window=256,stride=8/window=256,sinks=16,quest=15"
_COLOURS = ("red", "blue", "green", "white")
_NEW_TOKENS = 12
_TIMED = 16
Question = tuple[list[int], str]
"""A question's tokens, and the key that should follow."""


def rules_of(text: str) -> list[KvOption]:
    """Returns an option for each rule, after dense attention. Raises INVALID_ARGUMENT."""
    options = [KvOption("dense", torch.float32)]
    for part in filter(None, (part.strip() for part in text.split("/"))):
        try:
            sparse = parse_sparse_attention(part)
        except ValueError as error:
            raise errors.invalid("sparse", str(error), part) from error
        if sparse is None or sparse.layers:
            raise errors.invalid("sparse", "rules must not name layers: those that read everything follow them", part)
        options.append(KvOption(part, torch.float32, rule=sparse.rule))
    return options


def needle_prompt(tokenizer: Tokenizer, text_ids: Sequence[int], length: int) -> tuple[list[int], list[Question]]:
    """Returns a text of about `length` tokens with a key for each colour, and the questions."""
    keys = {colour: str(random.Random(f"{length} {colour}").randrange(10_000, 100_000)) for colour in _COLOURS}
    needles = [_ids(tokenizer, f"\n\nThe {colour} key is {key}. Remember it.\n\n") for colour, key in keys.items()]
    around = length - sum(map(len, needles)) - 16
    if around < len(keys) * 8:
        raise errors.invalid("pass-keys", "must be longer for several keys", length)
    places = [int(around * (number + 1) / (len(keys) + 1)) for number in range(len(keys))]
    prompt, done = list(text_ids[:1]), 1
    for place, needle in zip(places, needles, strict=True):
        prompt += [*text_ids[done : 1 + place], *needle]
        done = 1 + place
    prompt += text_ids[done : 1 + around]
    return prompt, [(_ids(tokenizer, f"\n\nWhat is the {each} key? The {each} key is"), key) for each, key in keys.items()]


def needles_found(
    tokenizer: Tokenizer, sequence: KvSequence, prompt: Sequence[int], questions: Sequence[Question], at_once: int
) -> list[bool]:
    """Returns which questions are answered by their key. The text is read once."""
    read(sequence, prompt, at_once)
    found = []
    for question, key in questions:
        sequence.rewind(len(prompt))
        logits_RV, answer = sequence.feed(question), list[int]()
        for _ in range(_NEW_TOKENS):
            answer.append(int(logits_RV[0].argmax()))
            logits_RV = sequence.feed(answer[-1:])
        found.append(key in tokenizer.decode(answer))
    return found


def step_times(sequences: Sequence[KvSequence], prompt: Sequence[int], at_once: int) -> tuple[list[float], list[float]]:
    """Returns the seconds of reading the prompt and, as the median of interleaved rounds, of one new token after it."""
    reading = []
    for sequence in sequences:
        began_s = time.perf_counter()
        read(sequence, prompt, at_once)
        reading.append(time.perf_counter() - began_s)
    steps: list[list[float]] = [[] for _ in sequences]
    for number in range(_TIMED):
        for sequence, seconds in zip(sequences, steps, strict=True):
            began_s = time.perf_counter()
            sequence.feed([prompt[1 + number]])
            seconds.append(time.perf_counter() - began_s)
    return reading, [statistics.median(seconds) for seconds in steps]


def read(sequence: KvSequence, prompt: Sequence[int], at_once: int) -> None:
    """Feeds a prompt to an empty sequence."""
    sequence.restart()
    for start in range(0, len(prompt), at_once):
        sequence.feed(prompt[start : start + at_once], [])


def _ids(tokenizer: Tokenizer, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids
