"""The JSON of chunks, with less work for those that only say text.

Most chunks of a stream differ in their text alone, so the rest is encoded once for each choice.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from json.encoder import encode_basestring_ascii
from typing import Any

encoded: Callable[[Any], str] = json.JSONEncoder(separators=(",", ":")).encode
"""Encodes as `json.dumps` does, which makes an encoder for each call."""

_GAP = "\0text\0"


class PlainText:
    """The JSON of values that differ in one text: `value_of` returns the value of a choice with a text."""

    def __init__(self, value_of: Callable[[int, str], Any]) -> None:
        self._value_of = value_of
        self._around: dict[int, tuple[str, str]] = {}

    def encoded(self, choice: int, text: str) -> str:
        """Returns what `encoded` returns for the value."""
        around = self._around.get(choice)
        if around is None:
            # The last gap: what names the model comes before the choices, and may be any text.
            before, _, after = encoded(self._value_of(choice, _GAP)).rpartition(encode_basestring_ascii(_GAP))
            around = self._around[choice] = before, after
        return around[0] + encode_basestring_ascii(text) + around[1]
