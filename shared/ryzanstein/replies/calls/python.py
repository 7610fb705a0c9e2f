"""Calls as Python writes them: `[weather(city="Rome", days=3), now()]`.

The texts among the arguments are passed on while they are written, other values when they are complete.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from ryzanstein.replies.calls.literals import FOLLOWS, as_json, escaped
from ryzanstein.replies.calls.objects import Outcome
from ryzanstein.replies.parts import Sink
from ryzanstein.replies.source import Source, Step

Take = Callable[[str], None]

_NAME_END = re.compile(r"[^A-Za-z0-9_.-]")
_MAX_NAME_CHARS = 256
_RUNS = {quote: re.compile(rf"[^\\{quote}]*") for quote in "\"'"}
_BARE = re.compile(r"[^\s,()\[\]{}'\"]*")
_LONGEST_ESCAPE = 9


def python_call(source: Source, sink: Sink) -> Step[Outcome]:
    """Reads one call, from its name to its last bracket; the source has a mark until it begins.

    After CALL the call is in the sink, whether or not it is whole.
    """
    name = (yield from source.until(_NAME_END, _MAX_NAME_CHARS)) or ""
    if not (yield from source.literal("(")):
        return Outcome.BROKEN
    yield from source.space()
    key = ""
    if not (yield from source.literal(")")):
        key = (yield from _key(source)) or ""
        if not key:
            return Outcome.BROKEN
    if not sink.accepts(name):
        whole = not key or (yield from _arguments(source, lambda text: None, key))
        return Outcome.OTHER if whole else Outcome.BROKEN
    source.unmark()
    sink.begin(name)
    if not key:
        sink.arguments("{}")
    else:
        yield from _arguments(source, sink.arguments, key)
    return Outcome.CALL


def _key(source: Source) -> Step[str | None]:
    """Returns the name of the next argument, and takes it with its equals sign."""
    key = yield from source.until(_NAME_END, _MAX_NAME_CHARS)
    yield from source.space()
    return key if (yield from source.literal("=")) else None


def _arguments(source: Source, take: Take, first: str) -> Step[bool]:
    """Passes the arguments on as an object. False: they are not whole, or too much waits."""
    before, key = "{", first
    while True:
        take(f"{before}{json.dumps(key, ensure_ascii=False)}: ")
        yield from source.space()
        if not (yield from _value(source, take)) or source.overrun():
            return False
        before = ", "
        yield from source.space()
        if (yield from source.literal(",")):
            yield from source.space()
        if (yield from source.literal(")")):
            take("}")
            return True
        found = yield from _key(source)
        if not found:
            return False
        key = found


def _value(source: Source, take: Take) -> Step[bool]:
    """Passes one value on. False: it is not whole."""
    if (yield from source.peek()) in _RUNS:
        take('"')
        if not (yield from _quoted(source, lambda text: take(json.dumps(text, ensure_ascii=False)[1:-1]))):
            return False
        take('"')
        return True
    pieces: list[str] = []
    whole = yield from _nested(source, pieces)
    written = "".join(pieces)
    take((as_json(written) or json.dumps(written, ensure_ascii=False)) if whole else written)
    return whole


def _nested(source: Source, pieces: list[str]) -> Step[bool]:
    """Takes a value that is no text, up to the comma or the bracket behind it. False: there is none, or it is not whole."""
    depth = 0
    while True:
        pieces.append(source.run(_BARE))
        if source.overrun():
            return False
        char = yield from source.peek()
        if not char:
            return False
        if depth == 0 and char in ",)":
            return bool("".join(pieces).strip())
        if char in _RUNS:
            if not (yield from _quoted(source, pieces.append, raw=True)):
                return False
            continue
        depth += (char in "([{") - (char in ")]}")
        if depth < 0:
            return False
        source.take()
        pieces.append(char)


class _Written:
    """Pieces that are passed on together: before more text is waited for, so that it does not matter how it was divided."""

    def __init__(self, source: Source, take: Take) -> None:
        self._source, self._take = source, take
        self._pieces: list[str] = []

    def add(self, text: str) -> None:
        self._pieces.append(text)

    def peek(self) -> Step[str]:
        """Returns the next character without taking it; empty at the end."""
        if self._source.exhausted:
            self.flush()
        return (yield from self._source.peek())

    def flush(self) -> None:
        self._take("".join(self._pieces))
        self._pieces.clear()


def _quoted(source: Source, take: Take, *, raw: bool = False) -> Step[bool]:
    """Takes a text between quotation marks and passes on what it says; `raw`: as it is written, with the marks."""
    quote = yield from source.peek()
    source.take()
    written = _Written(source, take)
    written.add(quote if raw else "")
    while True:
        written.add(source.run(_RUNS[quote]))
        if source.overrun():
            return False
        char = yield from written.peek()
        if char and char not in ("\\", quote):  # more of the text has come
            continue
        source.take()
        if char == "\\":
            written.add((yield from _escape(source, written, raw=raw)))
            continue
        space = (yield from _behind(source, written)) if char else None
        if space is not None:
            written.add(char + space)
            continue
        written.add(quote if raw and char else "")
        written.flush()
        return bool(char)


def _behind(source: Source, written: _Written) -> Step[str | None]:
    """Takes the white space behind a quotation mark, and returns it. None: the mark ends the text, by what follows it."""
    space: list[str] = []
    while (char := (yield from written.peek())).isspace():
        source.take()
        space.append(char)
    return None if not char or char in FOLLOWS else "".join(space)


def _escape(source: Source, written: _Written, *, raw: bool) -> Step[str]:
    """Takes what belongs to a backslash, and returns what it says."""
    code, said = "", None
    while said is None and len(code) < _LONGEST_ESCAPE:
        char = yield from written.peek()
        if not char:
            break
        source.take()
        code += char
        said = escaped(code)
    return "\\" + code if raw or said is None else said.encode(errors="replace").decode()
