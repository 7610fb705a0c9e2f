"""Takes what is content, up to the next marker."""

from __future__ import annotations

import re

from ryzanstein.replies.parts import Sink
from ryzanstein.replies.source import Source, Step


def content_until(source: Source, sink: Sink, *markers: str) -> Step[str]:
    """Takes content up to the next of these markers, which is taken, marked and returned; "" at the end.

    Without markers all that follows is content, but for the tag behind an answer that has tags around it.
    """
    sought = (*markers, *filter(None, (sink.answer_end,)))
    pattern = re.compile("|".join(map(re.escape, sought)) or "(?!)")
    while True:
        text, marker, ended = source.before(sought, pattern)
        sink.content(text)
        if marker and marker == sink.answer_end:
            sink.end_answer()
            continue
        if marker:
            source.mark(before=len(marker))
        if marker or ended:
            return marker
        yield
