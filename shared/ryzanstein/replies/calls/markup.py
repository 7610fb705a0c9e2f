"""Calls in tags of their own, each argument between two of them: `<parameter=city>Rome</parameter>`.

Arguments have no quotation marks, so the schema says which of them are texts. A text is passed on
while it is written, another value when it is complete.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from ryzanstein.replies.calls.literals import as_json
from ryzanstein.replies.parts import Sink
from ryzanstein.replies.source import Source, Step

_MAX_NAME_CHARS = 256


@dataclass(frozen=True, slots=True)
class Markup:
    """What stands around a call, its name, and each argument's name and value.

    `name_end` matches the character behind the name, `named` is taken there. `lines`: a line break on
    each side of a value is none of it.
    """

    begin: tuple[str, ...]
    name: str
    name_end: re.Pattern[str]
    named: str
    key: str
    keyed: str
    value: str
    valued: str
    end: str
    close: str
    lines: bool = False

    @property
    def valued_pattern(self) -> re.Pattern[str]:
        return re.compile(re.escape(self.valued))

    @property
    def texts(self) -> tuple[str, ...]:
        return tuple(filter(None, {*self.begin, self.name, self.key, self.value, self.valued, self.end, self.close}))


XML = Markup(
    ("<tool_call>", "<function="),
    "<function=",
    re.compile(">"),
    ">",
    "<parameter=",
    ">",
    "",
    "</parameter>",
    "</function>",
    "</tool_call>",
    lines=True,
)
SEED = Markup(
    ("<seed:tool_call>",),
    "<function=",
    re.compile(">"),
    ">",
    "<parameter=",
    ">",
    "",
    "</parameter>",
    "</function>",
    "</seed:tool_call>",
    lines=True,
)
GLM = Markup(
    ("<tool_call>",), "", re.compile(r"[<\s]"), "", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "", "</tool_call>"
)


def markup_call(source: Source, sink: Sink, markup: Markup, begun: str) -> Step[None]:
    """Reads what follows `begun`, a marker that begins a call, and what ends the call."""
    name = yield from _name(source, markup, begun)
    if name is None or not sink.accepts(name):
        sink.content(source.since_mark())
        return
    source.unmark()
    sink.begin(name)
    yield from _arguments(source, sink, markup, name)


def _name(source: Source, markup: Markup, begun: str) -> Step[str | None]:
    """Returns the name, if it is whole and something that may follow it does."""
    yield from source.space()
    if begun != markup.name and markup.name and not (yield from source.literal(markup.name)):
        return None
    name = yield from source.until(markup.name_end, _MAX_NAME_CHARS)
    if markup.named and not (yield from source.literal(markup.named)):
        return None
    yield from source.space()
    after = yield from source.literal(*_next(markup))
    source.take(-len(after))
    return name if after else None


def _next(markup: Markup) -> tuple[str, ...]:
    return tuple(filter(None, (markup.key, markup.end, markup.close)))


def _arguments(source: Source, sink: Sink, markup: Markup, name: str) -> Step[None]:
    before = "{"
    while True:
        yield from source.space()
        found = yield from source.literal(*_next(markup))
        if found != markup.key:
            break
        key = yield from _key(source, markup)
        if key is None and source.ended and source.exhausted:
            return
        if key is None:
            break
        sink.arguments(f"{before}{json.dumps(key, ensure_ascii=False)}: ")
        before = ", "
        if not (yield from _value(source, sink, markup, f"{name}:{key}")):
            return
    if not found:
        yield from source.close(*_next(markup))
        if source.ended and source.exhausted:  # the end has cut it
            return
    sink.arguments("{}" if before == "{" else "}")
    if found and found == markup.end:
        yield from source.space()
        yield from source.close(markup.close)


def _key(source: Source, markup: Markup) -> Step[str | None]:
    key = yield from source.until(re.compile(re.escape(markup.keyed[0])), _MAX_NAME_CHARS)
    if not (yield from source.literal(markup.keyed)):
        yield from source.close(markup.keyed)
        return None
    if markup.value:
        yield from source.space()
        if not (yield from source.literal(markup.value)):
            yield from source.close(markup.value)
            return None
    return key


def _value(source: Source, sink: Sink, markup: Markup, argument: str) -> Step[bool]:
    """Passes a value on. False: the end has cut it."""
    if markup.lines:
        yield from source.literal("\n")
    if sink.is_text(argument) and not (yield from _is_null(source, sink, markup, argument)):
        return (yield from _text(source, sink, markup))
    pieces: list[str] = []
    while True:
        text, marker, ended = source.before((markup.valued,), markup.valued_pattern)
        pieces.append(text)
        if marker or ended:
            break
        yield
    written = "".join(pieces)
    if marker:
        written = as_json(written) or _quoted(written.removesuffix("\n") if markup.lines else written)
    sink.arguments(written)
    return bool(marker)


def _is_null(source: Source, sink: Sink, markup: Markup, argument: str) -> Step[bool]:
    """Returns whether the value is null where it may be; nothing is taken."""
    if not sink.is_nullable(argument):
        return False
    forms = [f"{word}{space}{markup.valued}" for word in ("null", "None") for space in ("", *(["\n"] * markup.lines))]
    found = yield from source.literal(*forms)
    source.take(-len(found))
    return bool(found)


def _text(source: Source, sink: Sink, markup: Markup) -> Step[bool]:
    sink.arguments('"')
    line = ""
    while True:
        text, marker, ended = source.before((markup.valued,), markup.valued_pattern)
        text = line + text
        line = "\n" if markup.lines and text.endswith("\n") else ""
        sink.arguments(_quoted(text.removesuffix(line))[1:-1])
        if marker:
            sink.arguments('"')
            return True
        if ended:
            return False
        yield


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
