"""llguidance, in the version that all nodes of an answer must have: releases differ in what their grammars allow.

Inside vLLM, which brings another version, ours is a package of another name. Both fit into one process.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

_GUEST_NAME = "ryzanstein_llguidance"
"""The name of our version where another one is installed."""

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer, get_version, regex_to_lark
else:
    _library = import_module(_GUEST_NAME if find_spec(_GUEST_NAME) else "llguidance")
    LLMatcher, LLParserLimits, LLTokenizer = _library.LLMatcher, _library.LLParserLimits, _library.LLTokenizer
    get_version, regex_to_lark = _library.get_version, _library.regex_to_lark


def guidance_version() -> tuple[int, ...]:
    """Returns the release, as numbers."""
    release = get_version().removeprefix("llguidance@").partition(" ")[0]
    return tuple(int(number) for number in release.split(".")[:3])


__all__ = ["LLMatcher", "LLParserLimits", "LLTokenizer", "guidance_version", "regex_to_lark"]
