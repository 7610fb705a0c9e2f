"""Turns token ids into text one by one, as soon as a text is certain.

It never returns half a character and never takes text back. All pieces and the flush together equal
the result of decoding all tokens at once, special tokens skipped. Every step costs the same,
however long the answer is. This module knows nothing of stop strings or choices.
"""

from __future__ import annotations

import codecs
import copy
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from tokenizers import Tokenizer

from ryzanstein.worker.text.model_files import model_invalid

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_BYTE_LEVEL = ("ByteLevel",)
# Decoders that look at one token at a time, or strip one leading space, or join runs of byte
# tokens.
_PIECE_WISE = {
    (),
    ("Metaspace",),
    ("ByteFallback", "Metaspace"),
    ("ByteFallback", "Fuse", "Metaspace"),
    ("Replace", "Fuse"),
    ("Replace", "Fuse", "Strip"),
    ("Replace", "ByteFallback", "Fuse"),
    ("Replace", "ByteFallback", "Fuse", "Strip"),
}


class Detokenizer(Protocol):
    """A detokenizer that follows one choice."""

    def push(self, token_id: int) -> str:
        """Returns the text that became certain with this token; often empty."""
        ...

    def push_all(self, token_ids: Sequence[int]) -> str:
        """Returns the joined texts that `push` would return for each token."""
        ...

    def flush(self) -> str:
        """Returns what is left; an incomplete character becomes U+FFFD.

        Nothing may be pushed afterwards.
        """
        ...


class Vocabulary:
    """What a tokenizer's tokens stand for.

    All choices share it; its caches are bounded by the vocabulary. `spelled` is the same vocabulary
    where special tokens stand for their names.
    """

    def __init__(self, tokenizer: Tokenizer, tokenizer_json: str, path: Path) -> None:
        self._tokenizer = tokenizer
        self._skips_special = True
        self._forget()
        self._added = dict(tokenizer.get_added_tokens_decoder())
        kinds = _decoder_kinds(json.loads(tokenizer_json).get("decoder"), path)
        self.is_byte_level = kinds == _BYTE_LEVEL
        self._has_byte_tokens = "ByteFallback" in kinds
        if not self.is_byte_level and kinds not in _PIECE_WISE:
            raise model_invalid(path, f"decoder {' + '.join(kinds)} is not supported")

        self.spelled = self._spelled()

    def _spelled(self) -> Vocabulary:
        spelled = copy.copy(self)
        spelled._skips_special = False
        spelled._forget()
        return spelled

    def _forget(self) -> None:
        self._bytes: dict[int, bytes] = {}
        self._piece_bytes: dict[tuple[int, bool], bytes] = {}

    def detokenizer(self) -> Detokenizer:
        return ByteLevelDetokenizer(self) if self.is_byte_level else PieceDetokenizer(self)

    def is_skipped(self, token_id: int) -> bool:
        """Returns whether a token adds no text.

        These are special tokens, and ids after the tokenizer's last: embeddings are often padded to
        a round number.
        """
        added = self._added.get(token_id)
        return added.special and self._skips_special if added is not None else not self.token(token_id)

    def token(self, token_id: int) -> str:
        """Returns the token as the vocabulary spells it; empty if there is none."""
        return self._tokenizer.id_to_token(token_id) or ""

    def is_byte(self, token_id: int) -> bool:
        return _BYTE_TOKEN.fullmatch(self.token(token_id)) is not None

    def decode(self, token_ids: list[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=False))

    def bytes_of(self, token_id: int) -> bytes:
        """Returns the bytes of a byte-level token; empty if it is skipped."""
        known = self._bytes.get(token_id)
        if known is None:
            known = b"" if self.is_skipped(token_id) else self._spelling(token_id)
            self._bytes[token_id] = known
        return known

    def _spelling(self, token_id: int) -> bytes:
        added = self._added.get(token_id)
        return added.content.encode() if added is not None and added.special else _from_byte_level(self.token(token_id))

    def text_bytes(self, token_id: int, *, first: bool) -> bytes:
        """Returns what a token adds to the text.

        `first`: only skipped tokens are before it; there a piece may lose its space.
        """
        if self.is_byte_level:
            return self.bytes_of(token_id)
        key = token_id, first
        known = self._piece_bytes.get(key)
        if known is None:
            known = self._piece_bytes[key] = b"" if self.is_skipped(token_id) else self._decoded(token_id, first)
        return known

    def all_bytes(self, num_tokens: int) -> list[bytes]:
        """Returns what each of so many tokens adds to a text that has begun, as `text_bytes` does one by one."""
        ids = range(num_tokens)
        if self.is_byte_level:
            return [self.bytes_of(token_id) for token_id in ids]
        visible = [token_id for token_id in ids if not self.is_skipped(token_id)]
        alone = self._tokenizer.decode_batch([[token_id] for token_id in visible], skip_special_tokens=False)
        twice = self._tokenizer.decode_batch([[token_id, token_id] for token_id in visible], skip_special_tokens=False)
        added = [b""] * num_tokens
        for token_id, one, two in zip(visible, alone, twice, strict=True):
            is_byte = self._has_byte_tokens and self.is_byte(token_id)
            added[token_id] = self.text_bytes(token_id, first=False) if is_byte else two[len(one) :].encode()
        return added

    def _decoded(self, token_id: int, first: bool) -> bytes:
        """Returns the bytes that the decoder gives for a piece.

        For a piece that is not the first, they are what it adds after itself.
        """
        alone = self.decode([token_id])
        if self._has_byte_tokens and self.is_byte(token_id) and (alone or not first):
            return bytes([int(self.token(token_id)[3:5], 16)])
        return (alone if first else self.decode([token_id, token_id])[len(alone) :]).encode()

    def text(self, token_id: int) -> str:
        """Returns the text of a single token, special ones by name."""
        token = self.token(token_id)
        if token_id in self._added:
            return token
        if self.is_byte_level:
            return _from_byte_level(token).decode("utf-8", "replace")
        return self.decode([token_id]) if self.is_byte(token_id) else token.replace("\u2581", " ")


class ByteLevelDetokenizer:
    """A detokenizer for byte-level BPE (GPT-2's).

    Every token is a run of bytes; an incremental UTF-8 decoder does the rest.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._bytes_of = vocabulary.bytes_of
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        return self._decoder.decode(self._bytes_of(token_id))

    def push_all(self, token_ids: Sequence[int]) -> str:
        return self._decoder.decode(b"".join(map(self._bytes_of, token_ids)))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class PieceDetokenizer:
    """A detokenizer for vocabularies of text pieces (SentencePiece), with bytes as a fallback.

    Bytes spell what has no piece. A run of byte tokens is held until it ends: one bad byte makes
    all of the run U+FFFD. Each decode includes the piece before, so that only the very first piece
    loses its leading space.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._before: list[int] = []
        self._before_text = ""
        self._run: list[int] = []

    def push(self, token_id: int) -> str:
        if self._vocabulary.is_skipped(token_id):
            return ""
        self._run.append(token_id)
        if self._vocabulary.is_byte(token_id):
            return ""
        return self._finish(token_id)

    def push_all(self, token_ids: Sequence[int]) -> str:
        vocabulary = self._vocabulary
        run = self._run + [token_id for token_id in token_ids if not vocabulary.is_skipped(token_id)]
        last = next((i for i in reversed(range(len(run))) if not vocabulary.is_byte(run[i])), -1)
        self._run = run[: last + 1]
        text = self._finish(run[last]) if last >= 0 else ""
        self._run = run[last + 1 :]
        return text

    def _finish(self, last: int) -> str:
        """Returns the text of a run that ends with a piece."""
        text = self.flush()
        self._before = [last]
        self._before_text = self._vocabulary.decode(self._before)
        return text

    def flush(self) -> str:
        if not self._run:
            return ""
        text = self._vocabulary.decode(self._before + self._run)
        self._run = []
        return text[len(self._before_text) :]


def _decoder_kinds(decoder: dict[str, Any] | None, path: Path) -> tuple[str, ...]:
    if decoder is None:
        return ()
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    for step in steps:
        if step["type"] == "Strip" and (step["start"] > 1 or step["stop"] > 0):
            raise model_invalid(path, f"decoder Strip({step['start']}, {step['stop']}) is not supported")
    return tuple(step["type"] for step in steps)


def _byte_level_alphabet() -> dict[str, int]:
    """Returns the byte for each character of GPT-2's alphabet.

    GPT-2 writes printable bytes of Latin-1 as themselves, the others as U+0100, U+0101, ... in
    order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_ALPHABET = _byte_level_alphabet()
BYTE_LETTERS = {byte: letter for letter, byte in _ALPHABET.items()}
"""The character of GPT-2's alphabet for each byte."""


def _from_byte_level(token: str) -> bytes:
    """Returns the bytes of a byte-level token.

    A token outside the alphabet stands for itself: it was added to the vocabulary as a text.
    """
    try:
        return bytes(map(_ALPHABET.__getitem__, token))
    except KeyError:
        return token.encode()
