"""The chat templates of a tokenizer in the Hugging Face layout, by name."""

from __future__ import annotations

from typing import Any


def templates_of(value: Any) -> dict[str, str]:
    """Returns the templates in `chat_template` of tokenizer_config.json by name: one is the default one."""
    named = value if isinstance(value, list) else [{"name": "default", "template": value}]
    entries = [each for each in named if isinstance(each, dict) and isinstance(each.get("template"), str)]
    return {each["name"]: each["template"] for each in entries if isinstance(each.get("name"), str)}
