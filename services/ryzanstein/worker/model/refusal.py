"""Why a model cannot be served by these ranks, whatever is retried. Free of torch, so that the agent can name it too."""

from __future__ import annotations

import reprlib

MAX_MESSAGE_CHARS = 1000
_SHOWN = reprlib.Repr()
_SHOWN.maxlevel, _SHOWN.maxdict, _SHOWN.maxlist, _SHOWN.maxstring, _SHOWN.maxother, _SHOWN.maxlong = 3, 4, 6, 80, 80, 40


class ModelRefused(Exception):
    """Raised before anything large is allocated; the message names the tensor and file, or the numbers, that do not fit.

    Names and values come from files that anybody may have written: the message is bounded, and always text that can be sent.
    """

    def __init__(self, message: str) -> None:
        super().__init__(bounded(message))


class CheckpointError(ModelRefused):
    """The directory is no checkpoint that can be served: the message names the file and, where there is one, the tensor."""


class UnevenSplit(ModelRefused):
    """A dimension of the model does not divide over the ranks; the message has both numbers."""


def shown(value: object) -> str:
    """A value of a file for a message, shortened: it may be a megabyte, or nested a thousand times."""
    return _SHOWN.repr(value)


def bounded(message: str) -> str:
    """At most MAX_MESSAGE_CHARS, the middle left out; without the lone surrogates that JSON can spell and UTF-8 cannot."""
    if len(message) > MAX_MESSAGE_CHARS:
        half = MAX_MESSAGE_CHARS // 2 - 3
        message = f"{message[:half]} ... {message[-half:]}"
    return message.encode("utf-8", "backslashreplace").decode()
