"""Separates a template's own text from the messages' text in what it renders.

So no message can write a control token. The template is run twice, once on the messages as they are
and once with some of their characters replaced by others that occur nowhere else. If the second
text, with the characters put back, equals the first, then what is not replaced in it is the
template's. A template that examines the messages may behave differently on replaced ones: then
fewer characters are replaced.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain

from ryzanstein.worker.text.templates.rendering import Rendered
from ryzanstein.worker.text.templates.template_input import TemplateInput

_PRIVATE_USE = (range(0xE000, 0xF900), range(0xF0000, 0xFFFFE))
_PRIVATE = re.compile("[\ue000-\uf8ff\U000f0000-\U000ffffd]")

Pairs = Sequence[tuple[str, str]]
Render = Callable[[TemplateInput], str]


class Ambiguous(Exception):
    """It cannot be determined whether a control token is the template's or a message's."""


class ControlTexts:
    """The texts of a model's control tokens.

    The first `num_special` are those that templates do not look for.
    """

    def __init__(self, texts: Sequence[str], num_special: int) -> None:
        self._index = {text: i for i, text in enumerate(texts)}
        self._all = _any_of(texts)
        self._special = _any_of(texts[:num_special])
        self._chars = sorted(set(chain.from_iterable(texts)))

    def rendered(self, render: Render, given: TemplateInput, text: str) -> Rendered:
        """Returns the conversation as the template writes it, which is `text`. Raises Ambiguous."""
        for masked, lifted in self._ways(render, given, text):
            if lifted == text:
                own = self._found(masked)
                return Rendered(text, own, forged=len(own) != len(self._found(text)))
        raise Ambiguous

    def _ways(self, render: Render, given: TemplateInput, text: str) -> Iterator[tuple[str, str]]:
        """Yields the rendered texts of veiled messages, each with the same text unveiled.

        The strictest veil is first.
        """
        unused = _unused([text, *given.texts(), *self._chars])
        pairs = [(char, chr(private)) for char, private in zip(self._chars, unused, strict=False)]
        if len(pairs) < len(self._chars):
            raise Ambiguous
        for mask in self._masks(pairs):
            masked = given.mapped(mask)
            if masked == given:
                yield text, text
                return
            try:
                written = render(masked)
            except Exception:  # the template does not accept veiled messages
                continue
            yield written, _replaced(written, [(private, char) for char, private in pairs])

    def _masks(self, pairs: Pairs) -> Iterator[Callable[[str], str]]:
        """Yields the veils, from the strictest on.

        They replace: all characters that control tokens have; those that are not letters, so that
        words stay; only control tokens; of these only the special ones; one character of each of
        those.
        """
        yield partial(_replaced, pairs=pairs)
        yield partial(_replaced, pairs=[pair for pair in pairs if not pair[0].isalnum() and not pair[0].isspace()])
        for pattern in (self._all, self._special):
            yield partial(pattern.sub, lambda found: _replaced(found[0], pairs))
        yield partial(self._special.sub, lambda found: _with_middle_replaced(found[0], pairs))

    def _found(self, text: str) -> list[tuple[int, int]]:
        return [(found.start(), self._index[found[0]]) for found in self._all.finditer(text)]


def _any_of(texts: Sequence[str]) -> re.Pattern[str]:
    """Returns a pattern for the leftmost match, and of those the longest, as tokenizers search."""
    longest_first = sorted((text for text in texts if text), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


def _replaced(text: str, pairs: Pairs) -> str:
    """Returns the text with all pairs replaced, in one pass per pair.

    For a long text in a small alphabet this takes a tenth of the time of `str.translate`.
    """
    for old, new in pairs:
        text = text.replace(old, new)
    return text


def _with_middle_replaced(text: str, pairs: Pairs) -> str:
    middle = len(text) // 2
    return text[:middle] + _replaced(text[middle], pairs) + text[middle + 1 :]


def _unused(texts: Sequence[str]) -> Iterator[int]:
    """Returns private-use characters that are in none of the texts."""
    used = set().union(*texts) if any(map(_PRIVATE.search, texts)) else set()
    return (code for code in chain.from_iterable(_PRIVATE_USE) if chr(code) not in used)
