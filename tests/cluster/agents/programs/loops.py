"""Runs the loops of one client and reports each as a line of JSON: what it saw, or how it failed."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

URL, MODEL = sys.argv[1:3]
HUGE = "a line of a long file\n" * 60
RESULTS = {"Rome": "Rome: sonnig, 25 °C 🌞", "Oslo": ""}
"""What the tools return: text that is not ASCII, and none."""
PIXEL = "data:image/png;base64,iVBORw0KGgo="


class City(BaseModel):
    """A city, and for how many days."""

    model_config = ConfigDict(extra="forbid")

    name: Literal["Rome", "Oslo"]
    days: Literal[1, 2, 3]


def report(name: str, **seen: Any) -> None:
    print(json.dumps({"loop": name, **seen}), flush=True)


def run(name: str, loop: Callable[..., Any], *arguments: Any) -> None:
    try:
        report(name, seen=repr(loop(*arguments))[:300])
    except BaseException:
        report(name, error=traceback.format_exc()[-3000:])


def refused(name: str, loop: Callable[..., Any], says: str) -> None:
    """The server refuses it, and says why."""
    try:
        report(name, error=f"was not refused: {loop()!r}"[:500])
    except Exception as error:
        report(name, **({"refused": str(error)[:300]} if says in str(error) else {"error": traceback.format_exc()[-3000:]}))
