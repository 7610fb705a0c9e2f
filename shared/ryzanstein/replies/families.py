"""How families of models write calls. Each is a step that reads the rest of the text after any reasoning.

What begins like a call and is none comes back as content, with its markers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from ryzanstein.replies.gemma_calls import gemma_call
from ryzanstein.replies.json_calls import JsonCall, Outcome
from ryzanstein.replies.parts import Sink
from ryzanstein.replies.source import Source, Step

Family = Callable[[Source, Sink], Step[None]]

_NAME_END = re.compile(r"[\s{\[<\uff5c]")
_MAX_NAME_CHARS = 256


def content_until(source: Source, sink: Sink, *markers: str) -> Step[str]:
    """Takes content up to the next of these markers, which is taken, marked and returned; "" at the end.

    Without markers all that follows is content.
    """
    pattern = re.compile("|".join(map(re.escape, markers)) or "(?!)")
    while True:
        text, marker, ended = source.before(markers, pattern)
        sink.content(text)
        if marker:
            source.mark(before=len(marker))
        if marker or ended:
            return marker
        yield


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


def _gemma(source: Source, sink: Sink) -> Step[None]:
    """Gemma for functions: `<start_function_call>call:name{key:<escape>text<escape>}<end_function_call>`."""
    while (yield from content_until(source, sink, "<start_function_call>")):
        yield from gemma_call(source, sink)


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


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "llama3": _llama,
        "hermes": _tagged,
        "mistral": _mistral,
        "deepseek": _deepseek,
        "gemma": _gemma,
        "generic": _generic,
    }
)

MARKERS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "llama3": ("<|python_tag|>",),
        "hermes": ("<tool_call>", "</tool_call>"),
        "mistral": ("[TOOL_CALLS]", "[ARGS]"),
        "deepseek": DEEPSEEK_TOKENS,
        "gemma": ("<start_function_call>", "<end_function_call>", "<escape>"),
        "generic": ("<tool_call>", "</tool_call>"),
    }
)
"""What tells calls apart, which some tokenizers have as special tokens."""
