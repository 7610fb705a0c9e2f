"""The texts of a measurement, as token ids in windows.

Three consist of files that every Debian 12 has, of three kinds: legal English
(the licences of base-files), a program (the Perl modules of debconf) and short messages in some
seventy languages (debconf's own questions). Others are the user's files, and the dialogues that the
demo model knows.
"""

from __future__ import annotations

import codecs
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tokenizers import Tokenizer

from ryzanstein import errors

_BYTES_PER_TOKEN = 64  # more than the longest tokens have on average
_LICENCES = ("GPL-3", "MPL-1.1", "GFDL-1.3", "LGPL-2.1", "Artistic", "Apache-2.0", "MPL-2.0", "GPL-2")


@dataclass(frozen=True, slots=True)
class TextWindow:
    """Token ids that a model reads from an empty context, and the places of those that it predicts.

    No place is 0.
    """

    ids: tuple[int, ...]
    scored: Sequence[int]


class ReadText(Protocol):
    """A text as token ids."""

    @property
    def name(self) -> str: ...

    @property
    def source(self) -> str:
        """Where it is from: a Debian package, or a path."""
        ...

    @property
    def digest(self) -> str: ...

    def windows(self, length: int) -> list[TextWindow]:
        """Returns windows of at most `length` tokens."""
        ...

    def prompts(self, count: int, length: int) -> list[tuple[int, ...]]:
        """Returns `count` prompts of at most `length` tokens."""
        ...

    def beginning(self, length: int) -> tuple[int, ...]:
        """Returns the first `length` tokens."""
        ...


@dataclass(frozen=True, slots=True)
class TextSource:
    """Files that are read one after another."""

    name: str
    source: str
    paths: tuple[Path, ...]


@dataclass(frozen=True, slots=True)
class PlainText:
    """A text's first token ids, without special ones; a sequence of the model begins with `prefix`."""

    name: str
    source: str
    prefix: tuple[int, ...]
    ids: tuple[int, ...]

    @property
    def digest(self) -> str:
        return digest_of((self.prefix, self.ids))

    def windows(self, length: int) -> list[TextWindow]:
        """Returns windows that do not overlap, each after the prefix. The last may be shorter.

        Without a prefix the first token of a window is not scored.
        """
        step, first = length - len(self.prefix), max(1, len(self.prefix))
        cut = ((*self.prefix, *self.ids[start : start + step]) for start in range(0, len(self.ids), step))
        return [TextWindow(ids, range(first, len(ids))) for ids in cut if len(ids) > first]

    def prompts(self, count: int, length: int) -> list[tuple[int, ...]]:
        """Returns parts from places at equal distances, each after the prefix."""
        size = length - len(self.prefix)
        starts = ((len(self.ids) - size) * number // count for number in range(count))
        return [(*self.prefix, *self.ids[start : start + size]) for start in starts]

    def beginning(self, length: int) -> tuple[int, ...]:
        return (*self.prefix, *self.ids)[:length]


def debian_texts() -> tuple[TextSource, ...]:
    """Returns the three texts. Each consists of files of a package that every Debian 12 has."""
    licences = Path("/usr/share/common-licenses")
    modules = sorted(Path("/usr/share/perl5/Debconf").rglob("*.pm"))
    return (
        TextSource("licences", "base-files", tuple(licences / name for name in _LICENCES)),
        TextSource("program", "debconf", tuple(modules)),
        TextSource("languages", "debconf", (Path("/var/lib/dpkg/info/debconf.templates"),)),
    )


def plain_text(tokenizer: Tokenizer, source: TextSource, num_tokens: int) -> PlainText:
    """Returns the first `num_tokens` of a text.

    Raises INVALID_ARGUMENT if a file cannot be read, is not UTF-8, or the text is shorter.
    """
    ids = tokenizer.encode(_read(source, num_tokens * _BYTES_PER_TOKEN), add_special_tokens=False).ids
    if len(ids) < num_tokens:
        raise errors.invalid(f"text {source.name}", f"must have at least the {num_tokens} tokens of --tokens", len(ids))
    return PlainText(source.name, source.source, _prefix(tokenizer), tuple(ids[:num_tokens]))


def digest_of(ids: object) -> str:
    return hashlib.sha256(repr(ids).encode()).hexdigest()[:16]


def _read(source: TextSource, most: int) -> str:
    """Returns the text's beginning, of at most so many bytes."""
    if not source.paths:
        raise errors.invalid(f"text {source.name}", f"has no files here; they are of the Debian package {source.source}")
    content = b""
    for path in source.paths:
        try:
            with path.open("rb") as file:
                content += file.read(most - len(content))
        except OSError as error:
            raise errors.invalid(f"text {source.name}", f"{path}: {error.strerror}") from error
    try:
        return codecs.getincrementaldecoder("utf-8")().decode(content, final=len(content) < most)
    except UnicodeDecodeError as error:
        raise errors.invalid(f"text {source.name}", f"must be UTF-8: {error.reason} at byte {error.start}") from error


def _prefix(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Returns the special tokens that the tokenizer puts before a text."""
    with_special, plain = tokenizer.encode("a").ids, tokenizer.encode("a", add_special_tokens=False).ids
    starts = (i for i in range(len(with_special)) if with_special[i : i + len(plain)] == plain)
    return tuple(with_special[: next(starts, 0)])
