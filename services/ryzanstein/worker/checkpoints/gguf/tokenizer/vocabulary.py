"""The vocabulary of a GGUF file, read from its metadata and checked, and written back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, NoReturn

import numpy as np

from ryzanstein.worker.checkpoints.gguf.header import Value
from ryzanstein.worker.refusal import CheckpointError, excerpt

BPE, SENTENCEPIECE, SPACED_BPE = "gpt2", "llama", "gemma4"
"""The kinds of `tokenizer.ggml.model` that are converted: merges of bytes, scores, and merges of what SentencePiece splits."""

SPECIAL_IDS: Mapping[str, str] = {
    "bos": "bos_token_id",
    "eos": "eos_token_id",
    "eot": "eot_token_id",
    "eom": "eom_token_id",
    "unk": "unknown_token_id",
    "sep": "seperator_token_id",
    "pad": "padding_token_id",
    "cls": "cls_token_id",
    "mask": "mask_token_id",
}
"""Our names of special tokens by those of the file, whose spelling this is."""

_PREFIX = "tokenizer.ggml."
_TEMPLATE = "tokenizer.chat_template"
_TOOL_TEMPLATE = f"{_TEMPLATE}.tool_use"
"""The template of conversations with tools, where it is another one."""


class TokenType(IntEnum):
    """llama.cpp's types of tokens."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class GgufVocabulary:
    """The entries of a vocabulary by id, and how text becomes ids.

    `model` is BPE, with `merges` and `pre`, the name of what splits the text; or SENTENCEPIECE,
    with `scores`; or SPACED_BPE, with `merges`. `special` has ids by the names in SPECIAL_IDS. `add_bos`, `add_eos`: a text
    begins with the one, ends with the other. `add_space_prefix`: a text gets a space before it.
    `tool_template` is the chat template of conversations with tools, where that is another one.
    """

    model: str
    pre: str
    tokens: tuple[str, ...]
    types: tuple[int, ...]
    scores: tuple[float, ...] = ()
    merges: tuple[str, ...] = ()
    special: Mapping[str, int] = field(default_factory=dict)
    add_bos: bool = False
    add_eos: bool = False
    add_space_prefix: bool = True
    chat_template: str | None = None
    tool_template: str | None = None

    def ids(self, *types: TokenType) -> list[int]:
        """Returns the ids of all tokens of these types."""
        return [token_id for token_id, kind in enumerate(self.types) if kind in types]


def vocabulary_of(metadata: Mapping[str, Value], file: str, num_rows: int) -> GgufVocabulary:
    """Returns a file's vocabulary; the model has `num_rows` rows in its embedding.

    Raises CheckpointError, which names the key.
    """
    return _VocabularyReader(metadata, file).read(num_rows)


def vocabulary_metadata(vocabulary: GgufVocabulary) -> dict[str, Value]:
    """Returns the metadata that a file has for a vocabulary."""
    found: dict[str, Value] = {
        "model": vocabulary.model,
        "pre": vocabulary.pre,
        "tokens": vocabulary.tokens,
        "token_type": np.array(vocabulary.types, np.int32),
    }
    if vocabulary.model == SENTENCEPIECE:
        found["scores"] = np.array(vocabulary.scores, np.float32)
        found["add_space_prefix"] = vocabulary.add_space_prefix
    else:
        found["merges"] = vocabulary.merges
    found |= {SPECIAL_IDS[name]: token_id for name, token_id in vocabulary.special.items()}
    found |= {"add_bos_token": vocabulary.add_bos, "add_eos_token": vocabulary.add_eos}
    written = {f"{_PREFIX}{key}": value for key, value in found.items()}
    if vocabulary.chat_template is not None:
        written[_TEMPLATE] = vocabulary.chat_template
    if vocabulary.tool_template is not None:
        written[_TOOL_TEMPLATE] = vocabulary.tool_template
    return written


@dataclass(frozen=True, slots=True)
class _VocabularyReader:
    """Reads one file's metadata."""

    metadata: Mapping[str, Value]
    file: str

    def read(self, num_rows: int) -> GgufVocabulary:
        model = self._get("model", str, "a name")
        if model not in (BPE, SENTENCEPIECE, SPACED_BPE):
            self._refuse("model", f"{excerpt(model)} is not supported, only {BPE}, {SENTENCEPIECE} and {SPACED_BPE}")
        tokens = self._strings("tokens")
        if not 0 < len(tokens) <= num_rows:
            self._refuse("tokens", f"has {len(tokens)} entries, must be 1 to {num_rows}, the rows of the embedding")
        sentencepiece = model == SENTENCEPIECE
        pre = self._get("pre", str, "a name", "default" if model != BPE else None)
        return GgufVocabulary(
            model=model,
            pre=pre,
            tokens=tokens,
            types=self._types(len(tokens)),
            scores=self._scores(len(tokens)) if sentencepiece else (),
            merges=() if sentencepiece else self._strings("merges"),
            special=self._special(len(tokens)),
            add_bos=self._get("add_bos_token", bool, "true or false", model != BPE or pre in _BEGIN_BY_DEFAULT),
            add_eos=self._get("add_eos_token", bool, "true or false", False),
            add_space_prefix=sentencepiece and self._get("add_space_prefix", bool, "true or false", True),
            chat_template=self._template(_TEMPLATE),
            tool_template=self._template(_TOOL_TEMPLATE),
        )

    def _types(self, num_tokens: int) -> tuple[int, ...]:
        """Returns the types; without any, all are normal, as in llama.cpp."""
        if f"{_PREFIX}token_type" not in self.metadata:
            return (TokenType.NORMAL,) * num_tokens
        return tuple(self._numbers("token_type", num_tokens, np.integer).tolist())

    def _scores(self, num_tokens: int) -> tuple[float, ...]:
        scores = self._numbers("scores", num_tokens, np.floating)
        if not np.all(np.isfinite(scores)):
            self._refuse("scores", "has numbers that are not finite")
        return tuple(scores.tolist())

    def _special(self, num_tokens: int) -> dict[str, int]:
        found = {}
        for name, key in SPECIAL_IDS.items():
            value = self.metadata.get(f"{_PREFIX}{key}")
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                self._refuse(key, f"must be a token id, got {excerpt(value)}")
            # llama.cpp ignores ids that are no token, -1 among them.
            if 0 <= value < num_tokens:
                found[name] = value
        return found

    def _template(self, key: str) -> str | None:
        template = self.metadata.get(key)
        if template is not None and not isinstance(template, str):
            raise CheckpointError(f"{self.file}: {key} must be a text, got {excerpt(template)}")
        return template

    def _get(self, key: str, kind: type, what: str, default: Any = None) -> Any:
        value = self.metadata.get(f"{_PREFIX}{key}", default)
        if not isinstance(value, kind):
            self._refuse(key, "is missing" if value is None else f"must be {what}, got {excerpt(value)}")
        return value

    def _strings(self, key: str) -> tuple[str, ...]:
        found: tuple[str, ...] = self._get(key, tuple, "a list of texts")
        return found

    def _numbers(self, key: str, count: int, kind: type) -> np.ndarray[Any, np.dtype[Any]]:
        found: np.ndarray[Any, np.dtype[Any]] = self._get(key, np.ndarray, "a list of numbers")
        if len(found) != count or not np.issubdtype(found.dtype, kind):
            self._refuse(key, f"has {len(found)} items of type {found.dtype}, must have one for each of {count} tokens")
        return found

    def _refuse(self, key: str, what: str) -> NoReturn:
        raise CheckpointError(f"{self.file}: {_PREFIX}{key} {what}")


_BEGIN_BY_DEFAULT = ("llama-bpe", "llama3", "llama-v3", "tekken")
