"""Regular expressions in a configuration, which anybody may have written: those that may take forever are refused."""

from __future__ import annotations

import re

_MOST_REPEATS = 5
"""Of one pattern: each may multiply the steps of a match by the length of a name."""
_MOST_CHARACTERS = 10_000
_SETS = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)
"""Escaped characters, and sets of characters."""


def fault_of(pattern: str) -> str:
    """Returns why a pattern is not used; empty if it is."""
    if len(pattern) > _MOST_CHARACTERS:
        return f"has more than {_MOST_CHARACTERS} characters"
    try:
        re.compile(f"({pattern})")
    except (re.error, RecursionError, OverflowError) as error:
        return f"is no regular expression: {error}"
    plain = _SETS.sub("x", pattern)
    if sum(plain.count(sign) for sign in "*+{") > _MOST_REPEATS:
        return f"has more than {_MOST_REPEATS} repeats"
    return "repeats what may be matched in several ways" if _repeats_choices(plain) else ""


def _repeats_choices(plain: str) -> bool:
    """Returns whether a group is repeated that has alternatives or repeats: a match may take exponential time."""
    has_choices = [False]
    for sign, following in zip(plain, f"{plain} "[1:], strict=True):
        if sign == "(":
            has_choices.append(False)
        elif sign in "*+{|":
            has_choices[-1] = True
        elif sign == ")" and len(has_choices) > 1:
            inner = has_choices.pop()
            if inner and following in "*+{":
                return True
            has_choices[-1] |= inner
    return False
