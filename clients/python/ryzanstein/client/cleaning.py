"""Makes text of a model, of a user or of another machine safe to print on a terminal."""

from __future__ import annotations

import re

# Control characters but for tab and newline, those that change the direction of text, and halves of surrogate pairs.
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_LINE_ENDS = re.compile("\r\n?")


def clean(text: str) -> str:
    """Returns the text without what a terminal would obey.

    An escape sequence can clear the screen, write the clipboard or rename the window, and a change of direction shows another
    text than there is. What remains of a sequence is its harmless rest, so that nothing vanishes unseen.
    """
    return _UNSAFE.sub("", _LINE_ENDS.sub("\n", text))
