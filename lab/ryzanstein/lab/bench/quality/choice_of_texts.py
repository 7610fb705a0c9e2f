"""Chooses texts by name, or by path, and reads them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from ryzanstein import errors
from ryzanstein.lab.bench.quality.dialogues import DIALOGUES, dialogue_text
from ryzanstein.lab.bench.quality.texts import ReadText, TextSource, debian_texts, plain_text


def read_texts(tokenizer: Tokenizer, names: Sequence[str], num_tokens: int, prompts: int) -> list[ReadText]:
    """Returns the texts: Debian's by name, `dialogues`, files by path. Without names Debian's.

    Raises INVALID_ARGUMENT for one that cannot be read or is too short, and for two of one name.
    """
    known = {text.name: text for text in debian_texts()}
    read: list[ReadText] = []
    for name in names or known:
        if name == DIALOGUES:
            read.append(dialogue_text(tokenizer, num_tokens, prompts))
        else:
            source = known.get(name) or TextSource(Path(name).name, name, (Path(name),))
            read.append(plain_text(tokenizer, source, num_tokens))
    found = [text.name for text in read]
    twin = next((name for i, name in enumerate(found) if name in found[:i]), None)
    if twin is not None:
        raise errors.invalid("text", "each needs a name of its own", twin)
    return read
