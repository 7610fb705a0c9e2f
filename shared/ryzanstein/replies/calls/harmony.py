"""An answer in channels, as gpt-oss writes it: each message has a header that says what it is.

`<|channel|>analysis<|message|>...<|end|>` is reasoning, `<|channel|>commentary to=functions.f
<|message|>{...}<|call|>` a call, and everything else content. The prompt ends with `<|start|>assistant`.
"""

from __future__ import annotations

import re

from ryzanstein.replies.calls.objects import JsonCall, Outcome
from ryzanstein.replies.content import content_until
from ryzanstein.replies.parts import Sink
from ryzanstein.replies.source import Source, Step

_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
HARMONY_TOKENS = (_START, _CHANNEL, _MESSAGE, "<|constrain|>", *_ENDS)
_BODY_ENDS = (*_ENDS, _START, _CHANNEL)
_MESSAGE_PATTERN = re.compile(re.escape(_MESSAGE))
_BODY_END_PATTERN = re.compile("|".join(map(re.escape, _BODY_ENDS)))
_RECIPIENT = re.compile(r" to=([^\s<]+)")
_CHANNEL_NAME = re.compile(r"<\|channel\|>\s*(\w+)")
_FUNCTIONS = "functions."
_BETWEEN = "\n\n"


def harmony(source: Source, sink: Sink) -> Step[None]:
    """Reads all messages of an answer."""
    said: set[str] = set()
    sink.thinking = None
    source.mark()
    begun = yield from source.literal(_START, _CHANNEL, " to=")
    if not begun:
        sink.content(source.since_mark())
        begun = yield from content_until(source, sink, _START, _CHANNEL)
    while begun:
        header = yield from _header(source)
        if header is None:
            cut = source.ended and source.exhausted  # in a header, which is nothing yet
            sink.content("" if cut else source.since_mark())
        else:
            yield from _message(source, sink, begun + header, said)
        begun = yield from content_until(source, sink, _START, _CHANNEL)


def _header(source: Source) -> Step[str | None]:
    """Returns what stands before the message. None: too much does, or the end."""
    header = ""
    while True:
        text, marker, ended = source.before((_MESSAGE,), _MESSAGE_PATTERN)
        header += text
        if source.overrun() or (ended and not marker):
            return None
        if marker:
            return header
        yield


def _message(source: Source, sink: Sink, header: str, said: set[str]) -> Step[None]:
    channel, recipient = _CHANNEL_NAME.search(header), _RECIPIENT.search(header)
    if recipient is not None and recipient[1].startswith(_FUNCTIONS):
        yield from _call(source, sink, recipient[1].removeprefix(_FUNCTIONS))
        return
    source.unmark()
    if recipient is not None or (channel is not None and channel[1] == "analysis"):
        sink.thinking = True
        yield from _body(source, sink, "reasoning", said)
        sink.thinking = None
    else:
        sink.thinking = False if channel is not None and channel[1] == "final" else None
        yield from _body(source, sink, "content", said)


def _call(source: Source, sink: Sink, name: str) -> Step[None]:
    yield from source.space()
    outcome = yield from JsonCall(source, sink).read_arguments(name)
    if outcome is not Outcome.CALL:
        sink.content(source.since_mark())
        return
    yield from source.space()
    yield from source.close(*_ENDS)


def _body(source: Source, sink: Sink, kind: str, said: set[str]) -> Step[None]:
    """Passes a message on, without the white space around it. Two of a kind have an empty line between them."""
    yield from source.space()
    space = _BETWEEN if kind in said else ""
    while True:
        text, marker, ended = source.before(_BODY_ENDS, _BODY_END_PATTERN)
        delta = text.rstrip()
        if delta:
            (sink.reasoning if kind == "reasoning" else sink.content)(space + delta)
            space = ""
            said.add(kind)
        space += text[len(delta) :]
        if marker or ended:
            break
        yield
    if marker in (_START, _CHANNEL):
        source.take(-len(marker))
