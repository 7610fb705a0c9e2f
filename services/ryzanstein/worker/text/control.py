"""Makes control tokens (whose turn it is, where an answer ends) only from a template's own text.

The text of messages never becomes a control token. If no message contains a control token's text,
the rendered conversation is tokenized as it is. Otherwise the template's control tokens are
respelled in a way that cannot be guessed, for a tokenizer that knows them only by that spelling,
and everything else is plain text.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from tokenizers import AddedToken, Tokenizer

from ryzanstein import errors
from ryzanstein.worker.text.detokenizer import BYTE_LETTERS
from ryzanstein.worker.text.templates.rendering import Rendered

LONG_CHARS = 4096


def token_ids(tokenizer: Tokenizer, text: str, *, special: bool = False) -> list[int]:
    """Returns the tokens of a text.

    `special`: with the tokens that tokenizer.json puts around a text. For a long text, a call in a
    thread releases the interpreter to others.
    """
    if len(text) > LONG_CHARS:
        return list(tokenizer.encode_batch_fast([text], add_special_tokens=special)[0].ids)
    return list(tokenizer.encode(text, add_special_tokens=special).ids)


class ControlTokens:
    """The control tokens that a template may write.

    These are the tokens that the tokenizer calls special, and other added tokens that appear in the
    template itself and look like a marker: Gemma has line breaks among its added tokens, and a
    template is full of them. `texts` and `num_special` are as in `TemplateSource`. `unknown_ids`
    stand for characters that the vocabulary lacks.
    """

    def __init__(self, tokenizer: Tokenizer, template: str, unknown_ids: Iterable[int]) -> None:
        added = sorted(tokenizer.get_added_tokens_decoder().items())
        special = [(token_id, token) for token_id, token in added if token.special]
        others = ((token_id, token) for token_id, token in added if not token.special and _is_marker(token.content))
        written = [(token_id, token) for token_id, token in others if token.content in template]
        self._tokenizer = tokenizer
        self._ids = [token_id for token_id, _ in special + written]
        self.texts = tuple(token.content for _, token in special + written)
        self.num_special = len(special)
        unknown = list(unknown_ids)
        self._unknown = unknown[:1]
        self._watched = frozenset(self._ids) - frozenset(unknown)
        nonce = secrets.token_hex(16)
        self._spelled = [f"\ue000{nonce}:{index}\ue001" for index in range(len(self._ids))]
        plain = [(token_id, token) for token_id, token in added if token_id not in set(self._ids)]
        self._spelling = self._with_spelled_tokens([token for _, token in plain], [token for _, token in special + written])
        self._real = {self._spelling.token_to_id(token.content): token_id for token_id, token in plain}
        for spelled, token_id in zip(self._spelled, self._ids, strict=True):
            self._real[self._spelling.token_to_id(spelled)] = token_id

    def has(self, token_id: int) -> bool:
        """Returns whether it is one of them."""
        return token_id in self._watched

    def encode(self, rendered: Rendered) -> list[int]:
        """Returns the conversation's tokens.

        They are those of its text as a whole whenever no message contains a control token. Raises
        INVALID_ARGUMENT for a control token's text that the vocabulary cannot spell in others.
        """
        if not rendered.forged:
            ids = token_ids(self._tokenizer, rendered.text)
            found = (token_id for token_id in ids if token_id in self._watched)
            if _is_part(found, (self._ids[index] for _, index in rendered.control)):
                return ids
        return list(self._distinguished(rendered))

    def encode_text(self, text: str) -> list[int]:
        """Returns a text's tokens, of which none is a control token."""
        return self.encode(Rendered(text, [], forged=any(control in text for control in self.texts)))

    def _distinguished(self, rendered: Rendered) -> Iterator[int]:
        for token_id in token_ids(self._spelling, "".join(self._respelled(rendered))):
            if token_id in self._real:
                yield self._real[token_id]
            elif token_id in self._watched:  # some models have control tokens among their own pieces
                yield from self._letters(token_id)
            else:
                yield token_id

    def _respelled(self, rendered: Rendered) -> Iterator[str]:
        end = 0
        for offset, index in rendered.control:
            yield rendered.text[end:offset]
            yield self._spelled[index]
            end = offset + len(self.texts[index])
        yield rendered.text[end:]

    def _letters(self, token_id: int) -> list[int]:
        """Returns the tokens of each character of a token's text. INVALID_ARGUMENT: the vocabulary has none for one of them."""
        text = self._tokenizer.id_to_token(token_id) or ""
        found = [self._spelled_char(char) for char in text]
        if not all(found):
            bound = "must not have the text of a control token that the model's vocabulary cannot spell otherwise"
            raise errors.invalid("messages", bound, text[:64])
        return list(chain.from_iterable(found))

    def _spelled_char(self, char: str) -> list[int]:
        """Returns the tokens of a character: itself, its bytes as either kind of vocabulary writes them, or the unknown one."""
        bytes_ = char.encode()
        for pieces in ([char], [f"<0x{byte:02X}>" for byte in bytes_], [BYTE_LETTERS[byte] for byte in bytes_]):
            ids = [self._tokenizer.token_to_id(piece) for piece in pieces]
            known = [each for each in ids if each is not None and each not in self._watched]
            if len(known) == len(pieces):
                return known
        return self._unknown

    def _with_spelled_tokens(self, plain: list[AddedToken], control: Sequence[AddedToken]) -> Tokenizer:
        """Returns a tokenizer that shares the vocabulary, with other names for control tokens."""
        tokenizer = Tokenizer(self._tokenizer.model)
        if self._tokenizer.normalizer is not None:
            tokenizer.normalizer = self._tokenizer.normalizer
        if self._tokenizer.pre_tokenizer is not None:
            tokenizer.pre_tokenizer = self._tokenizer.pre_tokenizer
        tokenizer.add_tokens(plain)
        tokenizer.add_tokens(
            [
                AddedToken(spelled, special=True, normalized=False, lstrip=token.lstrip, rstrip=token.rstrip)
                for spelled, token in zip(self._spelled, control, strict=True)
            ]
        )
        return tokenizer


def _is_marker(text: str) -> bool:
    """Returns whether a text is none that people write between words, or as one: white space, a letter, a word, a sign."""
    return len(text.strip()) > 1 and not text.strip().isalnum()


def _is_part(some: Iterable[int], whole: Iterable[int]) -> bool:
    """Returns whether `some` is a subsequence of `whole`."""
    rest = iter(whole)
    return all(each in rest for each in some)
