"""Why these ranks cannot serve a model; no retry helps.

It imports no torch, so that the agent can use it too.
"""

from __future__ import annotations

import reprlib

MAX_MESSAGE_CHARS = 1000
_LISTED = reprlib.Repr()
_LISTED.maxlevel, _LISTED.maxdict, _LISTED.maxlist, _LISTED.maxstring, _LISTED.maxother, _LISTED.maxlong = 3, 4, 6, 80, 80, 40


class ModelRefused(Exception):
    """An error raised before anything large is allocated.

    The message names the tensor and file, or the numbers, that do not fit. Names and values come
    from untrusted files: the message is bounded, and always text that can be sent.
    """

    def __init__(self, message: str) -> None:
        super().__init__(bounded(message))


class CheckpointError(ModelRefused):
    """The directory is not a checkpoint that can be served.

    The message names the file and, if there is one, the tensor.
    """


class UnevenSplit(ModelRefused):
    """A dimension of the model does not divide over the ranks. The message has both numbers."""


class BeyondHalf(ModelRefused):
    """A weight is not a number of 16 bits, although all ranks have agreed to load the model so."""


def excerpt(value: object) -> str:
    """Returns a value of a file for a message, shortened.

    The value may be a megabyte, or nested a thousand times.
    """
    return _LISTED.repr(value)


def bounded(message: str) -> str:
    """Returns at most MAX_MESSAGE_CHARS of the message, without its middle if it is longer.

    Lone surrogates are escaped: JSON can contain them, UTF-8 cannot.
    """
    if len(message) > MAX_MESSAGE_CHARS:
        half = MAX_MESSAGE_CHARS // 2 - 3
        message = f"{message[:half]} ... {message[-half:]}"
    return message.encode("utf-8", "backslashreplace").decode()
