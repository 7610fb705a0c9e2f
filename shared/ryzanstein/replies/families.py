"""How families of models write calls. Each is a step that reads the rest of the text after any reasoning.

What begins like a call and is none comes back as content, with its markers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from ryzanstein.replies.calls.gemma import gemma_call
from ryzanstein.replies.calls.harmony import HARMONY_TOKENS, harmony
from ryzanstein.replies.calls.markup import GLM, SEED, XML, Markup, markup_call
from ryzanstein.replies.calls.objects import JsonCall, Outcome
from ryzanstein.replies.calls.python import python_call
from ryzanstein.replies.content import content_until
from ryzanstein.replies.parts import Sink
from ryzanstein.replies.source import Source, Step

Family = Callable[[Source, Sink], Step[None]]

_NAME_END = re.compile(r"[\s{\[<\uff5c]")
_MAX_NAME_CHARS = 256


def _tagged(source: Source, sink: Sink) -> Step[None]:
    """Hermes and Qwen: `<tool_call>{...}</tool_call>`."""
    while (yield from content_until(source, sink, "<tool_call>")):
        yield from source.space()
        yield from _object(source, sink, close="</tool_call>")


def _object(source: Source, sink: Sink, close: str = "") -> Step[Outcome]:
    """Reads an object that should be a call, and the marker behind it. The text since the mark is content if it is none."""
    if (yield from source.peek()) != "{":
        sink.content(source.since_mark())
        return Outcome.BROKEN
    outcome = yield from JsonCall(source, sink).read()
    if close and outcome is not Outcome.BROKEN:
        yield from source.space()
        yield from source.close(close)
    if outcome is not Outcome.CALL:
        sink.content(source.since_mark())
    return outcome


def _llama(source: Source, sink: Sink) -> Step[None]:
    """Llama 3: an answer that begins with `{...}`, or `<|python_tag|>{...}`; several with `;` between them."""
    yield from _bare(source, sink)
    while (yield from content_until(source, sink, "<|python_tag|>")):
        yield from source.space()
        yield from _row(source, sink)


def _bare(source: Source, sink: Sink) -> Step[None]:
    source.mark()
    yield from source.space()
    if (yield from source.peek()) == "{":
        yield from _row(source, sink)
    else:
        sink.content(source.since_mark())


def _row(source: Source, sink: Sink) -> Step[None]:
    """Reads objects with a semicolon or nothing between them."""
    while (yield from _object(source, sink)) is Outcome.CALL:
        source.mark()
        yield from source.space()
        yield from source.literal(";")
        yield from source.space()
        if (yield from source.peek()) != "{":
            sink.content(source.since_mark())
            return


def _mistral(source: Source, sink: Sink) -> Step[None]:
    """Mistral: `[TOOL_CALLS]` before a list of objects, or before each name and its arguments."""
    while (yield from content_until(source, sink, "[TOOL_CALLS]")):
        yield from source.space()
        match (yield from source.peek()):
            case "[":
                yield from _list(source, sink)
            case "{":
                yield from _object(source, sink)
            case _:
                yield from _named(source, sink, ("[ARGS]",))


def _list(source: Source, sink: Sink) -> Step[None]:
    """Reads a list of objects; each that is no call is content by itself."""
    source.take()
    yield from _rest_of_list(source, sink)


def _rest_of_list(source: Source, sink: Sink) -> Step[None]:
    while True:
        yield from source.space()
        if not (yield from source.literal(",")) and (yield from source.literal("]")):
            text = source.since_mark()
            sink.content(text if sink.num_calls == 0 else "")
            return
        yield from source.space()
        if (yield from _object(source, sink)) is Outcome.BROKEN:
            return
        source.mark()


def _named(source: Source, sink: Sink, separators: Sequence[str], close: str = "") -> Step[None]:
    """Reads a name, one of the separators or nothing, and an object with the arguments."""
    name = yield from source.until(_NAME_END, _MAX_NAME_CHARS)
    yield from source.space()
    yield from source.literal(*separators)
    yield from source.space()
    outcome = yield from JsonCall(source, sink).read_arguments(name or "")
    if outcome is not Outcome.BROKEN and close:
        yield from source.space()
        if (yield from source.literal("```")):
            yield from source.space()
        yield from source.close("```", close)
    if outcome is not Outcome.CALL:
        sink.content(source.since_mark())


DEEPSEEK_TOKENS = tuple(
    f"<\uff5ctool\u2581{name}\uff5c>"
    for name in ("calls\u2581begin", "call\u2581begin", "sep", "call\u2581end", "calls\u2581end")
)
_CALLS_BEGIN, _CALL_BEGIN, _SEPARATOR, _CALL_END, _CALLS_END = DEEPSEEK_TOKENS


def _deepseek(source: Source, sink: Sink) -> Step[None]:
    """DeepSeek: a name and its arguments between tokens of their own; before version 3.1 in a block of code."""
    while marker := (yield from content_until(source, sink, _CALLS_BEGIN, _CALL_BEGIN)):
        yield from source.space()
        if marker == _CALLS_BEGIN and not (yield from source.literal(_CALL_BEGIN)):
            sink.content(source.since_mark())
            continue
        yield from source.literal("function" + _SEPARATOR)
        yield from _named(source, sink, (_SEPARATOR, "```json"), _CALL_END)
        if sink.num_calls:
            yield from source.space()
            yield from source.close(_CALLS_END)


def _gemma(begin: str, end: str, quote: str) -> Family:
    """Gemma: `<start_function_call>call:name{key:<escape>text<escape>}<end_function_call>`, by its generation's markers."""

    def read(source: Source, sink: Sink) -> Step[None]:
        while (yield from content_until(source, sink, begin)):
            yield from gemma_call(source, sink, end, quote)

    return read


def _marked(end: str, *begins: str) -> Family:
    """A marker before a list of objects, or before one, and perhaps one behind it."""

    def read(source: Source, sink: Sink) -> Step[None]:
        while (yield from content_until(source, sink, *begins)):
            yield from source.space()
            num_before = sink.num_calls
            if (yield from source.peek()) == "[":
                yield from _list(source, sink)
            else:
                yield from _object(source, sink)
            if end and sink.num_calls > num_before:
                yield from source.space()
                yield from source.close(end)

    return read


def _hunyuan(source: Source, sink: Sink) -> Step[None]:
    """Hunyuan: `<tool_calls>` before a list of objects, or before each name and its arguments in a block of code."""
    while marker := (yield from content_until(source, sink, "<tool_calls>", "<tool_call>")):
        yield from source.space()
        if marker == "<tool_calls>" and (yield from source.literal("<tool_call>")):
            marker = "<tool_call>"
            yield from source.space()
        num_before = sink.num_calls
        match (yield from source.peek()):
            case "[":
                yield from _list(source, sink)
            case "{":
                yield from _object(source, sink, close="</tool_call>")
            case _:
                yield from _named(source, sink, ("```json",), "</tool_call>")
        if sink.num_calls > num_before:
            yield from source.space()
            yield from source.close("</tool_calls>")


def _tags(markup: Markup) -> Family:
    """Qwen 3 Coder, Seed and GLM 4.5: the name and each argument in tags of their own."""

    def read(source: Source, sink: Sink) -> Step[None]:
        while marker := (yield from content_until(source, sink, *markup.begin)):
            yield from source.space()
            if (yield from source.peek()) == "{":
                yield from _object(source, sink, close=markup.close)
            else:
                yield from markup_call(source, sink, markup, marker)

    return read


def _python(begin: str, end: str, bracket: str = "") -> Family:
    """LFM2 and OLMo 3: calls as Python writes them, in brackets or one in a line."""

    def read(source: Source, sink: Sink) -> Step[None]:
        while (yield from content_until(source, sink, begin)):
            yield from source.space()
            if bracket and (yield from source.literal(bracket)):
                yield from source.space()
            num_before = sink.num_calls
            if (yield from source.peek()) == "{":
                yield from _rest_of_list(source, sink)
            else:
                yield from _python_row(source, sink)
            if sink.num_calls > num_before:
                yield from source.space()
                yield from source.close(end)

    return read


def _python_row(source: Source, sink: Sink) -> Step[None]:
    """Reads calls with commas or line breaks between them, and the bracket behind them."""
    while (outcome := (yield from python_call(source, sink))) is not Outcome.BROKEN:
        if outcome is Outcome.OTHER:
            sink.content(source.since_mark())
        source.mark()
        yield from source.space()
        yield from source.literal(",", ";")
        yield from source.space()
        if (yield from source.literal("]")):
            yield from source.space()
        char = yield from source.peek()
        if not (char.isalnum() or char == "_"):
            source.unmark()
            return
    sink.content(source.since_mark())


def _generic(source: Source, sink: Sink) -> Step[None]:
    """Any model: tagged calls anywhere, or an answer that begins with an object, a list, or a block of JSON."""
    source.mark()
    yield from source.space()
    fenced = yield from source.literal("```json", "```")
    yield from source.space()
    match (yield from source.peek()):
        case "{":
            yield from _row(source, sink)
        case "[":
            yield from _list(source, sink)
        case _:
            sink.content(source.since_mark())
            fenced = ""
    if fenced and sink.num_calls:
        yield from source.space()
        yield from source.close("```")
    yield from _tagged(source, sink)


_GEMMA = ("<start_function_call>", "<end_function_call>", "<escape>")
_GEMMA4 = ("<|tool_call>", "<tool_call|>", '<|"|>')
_LFM2 = ("<|tool_call_start|>", "<|tool_call_end|>")
_OLMO3 = ("<function_calls>", "</function_calls>")
_HERMES = ("<tool_call>", "</tool_call>")
_COHERE = ("<|START_ACTION|>", "<|END_ACTION|>")
_GRANITE = ("<|tool_call|>", "<tool_call>")
_ROWS: Mapping[str, tuple[Family, tuple[str, ...]]] = {
    "llama3": (_llama, ("<|python_tag|>",)),
    "hermes": (_tagged, _HERMES),
    "mistral": (_mistral, ("[TOOL_CALLS]", "[ARGS]")),
    "ministral": (_mistral, ("[TOOL_CALLS]", "[ARGS]")),
    "deepseek": (_deepseek, DEEPSEEK_TOKENS),
    "lfm2": (_python(*_LFM2, "["), _LFM2),
    "olmo3": (_python(*_OLMO3), _OLMO3),
    "qwen_xml": (_tags(XML), XML.texts),
    "seed": (_tags(SEED), SEED.texts),
    "glm": (_tags(GLM), GLM.texts),
    "granite": (_marked("", *_GRANITE), _GRANITE),
    "cohere": (_marked(_COHERE[1], _COHERE[0]), _COHERE),
    "hunyuan": (_hunyuan, (*_HERMES, "<tool_calls>", "</tool_calls>")),
    "gemma": (_gemma(*_GEMMA), _GEMMA),
    "gemma4": (_gemma(*_GEMMA4), _GEMMA4),
    "harmony": (harmony, HARMONY_TOKENS),
    "generic": (_generic, _HERMES),
}
FAMILIES: Mapping[str, Family] = MappingProxyType({name: read for name, (read, _) in _ROWS.items()})
MARKERS: Mapping[str, tuple[str, ...]] = MappingProxyType({name: markers for name, (_, markers) in _ROWS.items()})
"""What tells calls apart, which some tokenizers have as special tokens."""
UNQUOTED = frozenset({"qwen_xml", "seed", "glm"})
"""Families that write texts without quotation marks, so that the schema has to say which arguments are texts."""
