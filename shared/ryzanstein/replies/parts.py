"""The parts of an answer, and who collects them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import groupby
from typing import NamedTuple

from ryzanstein.generation.reply_format import ReplyFormat

_ID_CHARS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
MAX_SPACE_CHARS = 16_384
_ID_LENGTH = 9
"""Mistral's templates refuse ids of another length."""


class Content(NamedTuple):
    """A piece of what the assistant answers."""

    text: str


class Reasoning(NamedTuple):
    """A piece of what the assistant thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A piece of a call's arguments. The first of each call has its id and name, later ones are without.

    Calls have the indices 0, 1, 2, ... in the order in which they begin, and one ends before the
    next begins.
    """

    index: int
    id: str
    name: str
    arguments: str


Part = Content | Reasoning | CallDelta


def call_id(generation_id: str, choice: int, index: int) -> str:
    """Returns the id of a call: the same for every reader of the generation, at every router."""
    number = int.from_bytes(blake2b(f"{generation_id}:{choice}:{index}".encode(), digest_size=8).digest())
    chars = []
    for _ in range(_ID_LENGTH):
        number, rest = divmod(number, len(_ID_CHARS))
        chars.append(_ID_CHARS[rest])
    return "".join(chars)


class Sink:
    """Collects the parts of one choice as they become certain.

    White space at the end of the content is held back: before and after calls it is layout, and
    not part of the answer. So much of it that it is more than a layout is content.
    """

    def __init__(self, format: ReplyFormat, generation_id: str, choice: int) -> None:
        self._names, self._max_calls = format.tools, format.max_calls
        self._texts, self._nullable = format.texts, format.nullable
        self._generation_id, self._choice = generation_id, choice
        self._parts: list[Part] = []
        self._space = ""
        self._after_call = False
        self.num_calls = 0
        self.thinking: bool | None = None
        self.answer_end = ""
        """The tag that ends the answer, where one began it."""

    def accepts(self, name: str) -> bool:
        """Returns whether this function may be called now; the text of another call is content."""
        return name in self._names and self.num_calls < self._max_calls

    def is_text(self, argument: str) -> bool:
        """Returns whether an argument (`function:argument`) is a text, also where it looks like a number."""
        return argument in self._texts

    def is_nullable(self, argument: str) -> bool:
        """Returns whether an argument that is a text may be null."""
        return argument in self._nullable

    def end_answer(self) -> None:
        """Takes the tag behind the answer: the white space before it is none of it."""
        self._space, self._after_call, self.answer_end = "", True, ""

    def content(self, text: str) -> None:
        delta = text.rstrip()
        if delta:
            self._parts.append(Content(self._space + delta))
            self._space, self._after_call = "", False
        self._space += text[len(delta) :]
        # Whole blocks, so that it does not matter how the text was divided.
        if blocks := len(self._space) // MAX_SPACE_CHARS * MAX_SPACE_CHARS:
            self._parts.append(Content(self._space[:blocks]))
            self._space, self._after_call = self._space[blocks:], False

    def reasoning(self, text: str) -> None:
        if text:
            self._parts.append(Reasoning(text))

    def begin(self, name: str) -> None:
        """Begins a call of a function that is accepted."""
        index, self.num_calls = self.num_calls, self.num_calls + 1
        self._space, self._after_call = "", True
        self._parts.append(CallDelta(index, call_id(self._generation_id, self._choice, index), name, ""))

    def arguments(self, text: str) -> None:
        """Adds to the arguments of the call that began last."""
        if text:
            self._parts.append(CallDelta(self.num_calls - 1, "", "", text))

    def end(self) -> None:
        """Ends the text: white space that nothing followed is content, unless it follows a call."""
        if self._space and not self._after_call:
            self._parts.append(Content(self._space))
        self._space = ""

    def taken(self) -> list[Part]:
        """Returns the parts since the last time, neighbours of one kind joined."""
        parts, self._parts = self._parts, []
        return parts if len(parts) < 2 else [_as_one(list(alike)) for _, alike in groupby(parts, _kind)]


def _kind(part: Part) -> tuple[type[Part], int]:
    return type(part), part.index if isinstance(part, CallDelta) else 0


def _as_one(parts: list[Part]) -> Part:
    """Joins parts of one kind; all at once, since an answer may consist of 100,000."""
    first = parts[0]
    if isinstance(first, CallDelta):
        return replace(first, arguments="".join(part.arguments for part in parts if isinstance(part, CallDelta)))
    return type(first)("".join(part.text for part in parts if not isinstance(part, CallDelta)))
