"""What a model's tokens stand for, as the masks need it: made from the tokenizer once per model.

It travels from the agent to rank 0, so that both see the bytes that the detokenizer writes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from ryzanstein.worker.constraints.guidance import LLTokenizer

_SPECIAL = b"\xff"  # no text in UTF-8 contains it
_BLANK = b" \t\r\n"

Words = npt.NDArray[np.uint32]
"""One bit per token, the lowest bit of the first word first."""


class TokenTable(msgspec.Struct, frozen=True):
    """The bytes of each token; of a special one its name, and of one without text nothing.

    `special` ids are never a part of text, only of grammars that name them. `eos` end an answer.
    """

    tokens: list[bytes]
    special: list[int]
    eos: list[int]

    @classmethod
    def decode(cls, packed: bytes) -> TokenTable:
        return msgspec.msgpack.decode(packed, type=cls)

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    def special_id(self, text: str) -> int | None:
        """Returns the id of the special token with this name."""
        name = text.encode()
        return next((token_id for token_id in self.special if self.tokens[token_id] == name), None)

    @property
    def num_words(self) -> int:
        return (len(self.tokens) + 31) // 32

    def words(self, token_ids: list[int]) -> Words:
        """Returns a mask with the bits of these tokens."""
        flags = np.zeros(self.num_words * 32, np.uint8)
        flags[[token_id for token_id in token_ids if 0 <= token_id < len(self.tokens)]] = 1
        return np.packbits(flags, bitorder="little").view(np.uint32)

    def blank_ids(self) -> list[int]:
        """Returns the tokens of white space only."""
        special = set(self.special)
        return [i for i, token in enumerate(self.tokens) if token and i not in special and not token.strip(_BLANK)]

    def tokenizer(self) -> LLTokenizer:
        """Returns llguidance's view of it. Takes a second for 256 k tokens."""
        from ryzanstein.worker.constraints.guidance import LLTokenizer

        # None of them: the answer ends with its last token.
        eos = self.eos or [len(self.tokens) - 1]
        return LLTokenizer(_Vocabulary(self, eos[0]), n_vocab=len(self.tokens), eos_token=eos)  # type: ignore[arg-type]


class _Vocabulary:
    """A vocabulary in the form that llguidance takes instead of a tokenizer file."""

    bos_token_id = None
    is_tokenizer_wrapper = True

    def __init__(self, table: TokenTable, eos_token_id: int) -> None:
        special = set(table.special)
        self.tokens = [_SPECIAL + token if i in special else token for i, token in enumerate(table.tokens)]
        self.special_token_ids = table.special
        self.eos_token_id = eos_token_id

    def __call__(self, text: str) -> list[int]:
        """Returns nothing: text is only tokenized to force it, which grammars forbid."""
        return []
