"""Tells a template's own text from the messages' in what it renders, so that no message can write a control token.

The template is run twice, once on the messages as they are and once with characters of them replaced by others that occur
nowhere else. When the second text, with the characters put back, is the first one, then what is not replaced in it is the
template's. A template that looks into the messages may take another way on replaced ones: then fewer characters are replaced.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain

from ryzanstein.worker.text.templates.rendering import Rendered, Said

_PRIVATE_USE = (range(0xE000, 0xF900), range(0xF0000, 0xFFFFE))

Render = Callable[[Sequence[Said]], str]


class Ambiguous(Exception):
    """Nobody can tell whether a control token is the template's or a message's."""


class ControlTexts:
    """The texts of a model's control tokens. The first `num_special` are those about which templates do not ask."""

    def __init__(self, texts: Sequence[str], num_special: int) -> None:
        self._index = {text: i for i, text in enumerate(texts)}
        self._all = _any_of(texts)
        self._special = _any_of(texts[:num_special])
        self._chars = sorted(set(chain.from_iterable(texts)))

    def rendered(self, render: Render, messages: Sequence[Said]) -> Rendered:
        """The conversation as the template writes it. Raises what `render` does for these messages, and Ambiguous."""
        text = render(messages)
        for veiled, lifted in self._ways(render, messages, text):
            if lifted == text:
                own = self._found(veiled)
                return Rendered(text, own, forged=len(own) != len(self._found(text)))
        raise Ambiguous

    def _ways(self, render: Render, messages: Sequence[Said], text: str) -> Iterator[tuple[str, str]]:
        """Texts of veiled messages, and the same with the veil lifted, from the strictest on."""
        table = dict(zip(map(ord, self._chars), _unused([text, *(content for _, content in messages)]), strict=False))
        if len(table) < len(self._chars):
            raise Ambiguous
        back = {private: char for char, private in table.items()}
        for veil in self._veils(table):
            veiled = [(role, veil(content)) for role, content in messages]
            if veiled == list(messages):
                yield text, text
                return
            try:
                written = render(veiled)
            except Exception:  # the template does not take veiled messages
                continue
            yield written, written.translate(back)

    def _veils(self, table: dict[int, int]) -> Iterator[Callable[[str], str]]:
        """All characters that control tokens have; those that are no letters, so that words stay; only control tokens; of
        these only the special ones."""
        yield lambda content: content.translate(table)
        signs = {char: private for char, private in table.items() if not chr(char).isalnum() and not chr(char).isspace()}
        yield lambda content: content.translate(signs)
        for pattern in (self._all, self._special):
            yield lambda content, pattern=pattern: pattern.sub(lambda found: found[0].translate(table), content)

    def _found(self, text: str) -> list[tuple[int, int]]:
        return [(found.start(), self._index[found[0]]) for found in self._all.finditer(text)]


def _any_of(texts: Sequence[str]) -> re.Pattern[str]:
    """The leftmost, and of those the longest, as tokenizers look for them."""
    longest_first = sorted((text for text in texts if text), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


def _unused(texts: Iterable[str]) -> Iterator[int]:
    """Characters for private use that are in none of the texts."""
    used = set().union(*texts)
    return (code for code in chain.from_iterable(_PRIVATE_USE) if chr(code) not in used)
