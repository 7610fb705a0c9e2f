"""Paths of models and of their files with the names of the models, as settings and options have them.

A setting has `PATH` or `NAME=PATH`, comma-separated, or a JSON object of names and paths, which can
hold any of both. An option of the command line has one path, `PATH` or `NAME=PATH`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path


def is_object(setting: str) -> bool:
    """Whether a setting is meant as a JSON object."""
    return setting.lstrip().startswith("{")


def read_setting(setting: str) -> list[tuple[str, str]]:
    """Returns the names, empty where there is none, and the paths of a setting. Raises ValueError."""
    if not is_object(setting):
        entries = [entry.strip().rpartition("=") for entry in setting.split(",") if entry.strip()]
        return [(name.strip(), path.strip()) for name, _, path in entries]
    try:
        pairs = json.loads(setting, object_pairs_hook=list)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"begins with a brace and is no JSON object: {error}") from None
    if not all(isinstance(path, str) for _, path in pairs):
        raise ValueError("a JSON object must have names and paths, which are strings")
    return [(name, path) for name, path in pairs]


def write_setting(pairs: Sequence[tuple[str, Path]]) -> str:
    """Returns the setting of names and paths; empty if there are none."""
    return json.dumps({name: str(path) for name, path in pairs}, ensure_ascii=False) if pairs else ""


def read_option(text: str) -> tuple[str, Path]:
    """Returns the name, empty if there is none, and the path of an option.

    Both may have equals signs: what exists as a path decides. If nothing does, the first one divides.
    """
    if os.path.exists(text) or "=" not in text:
        return "", Path(text)
    splits = [(text[:place], Path(text[place + 1 :])) for place, each in enumerate(text) if each == "="]
    return next(((name, path) for name, path in splits if name and os.path.exists(path)), splits[0])
