"""Reads what the text side needs from a model directory in the Hugging Face layout.

Every error names the file. Weights are the ranks' business.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ryzanstein import errors
from ryzanstein.errors import RyzansteinError

_SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """What the files say; `special_tokens` by name (bos_token, eos_token, ...)."""

    directory: Path
    tokenizer_json: str
    context_length: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    special_tokens: Mapping[str, str]
    extra_special_tokens: tuple[str, ...]
    chat_template: str | None

    @classmethod
    def read(cls, directory: Path) -> ModelFiles:
        """FAILED_PRECONDITION with reason MODEL_INVALID naming the file that is missing or wrong."""
        config = _read_json(directory / "config.json")
        text_config = {**config, **config.get("text_config", {})}
        generation = _read_json(directory / "generation_config.json", required=False)
        tokenizer = _read_json(directory / "tokenizer_config.json", required=False)
        return cls(
            directory=directory,
            tokenizer_json=_read_text(directory / "tokenizer.json"),
            context_length=_positive(text_config, "max_position_embeddings", directory),
            vocab_size=_positive(text_config, "vocab_size", directory),
            eos_token_ids=_ids(text_config.get("eos_token_id")) | _ids(generation.get("eos_token_id")),
            special_tokens=_special_tokens(tokenizer),
            extra_special_tokens=_extra_special_tokens(tokenizer),
            chat_template=_chat_template(directory, tokenizer),
        )


def model_invalid(path: Path, what: str) -> RyzansteinError:
    """The model directory cannot be served, whatever is retried."""
    return errors.failed_precondition("MODEL_INVALID", f"{path}: {what}")


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise model_invalid(path, str(error)) from error


def _read_json(path: Path, *, required: bool = True) -> dict[str, Any]:
    if not required and not path.exists():
        return {}
    try:
        value = json.loads(_read_text(path))
    except ValueError as error:
        raise model_invalid(path, f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise model_invalid(path, f"must be an object, is {type(value).__name__}")
    return value


def _positive(config: Mapping[str, Any], key: str, directory: Path) -> int:
    value = config.get(key)
    if not isinstance(value, int) or value < 1:
        raise model_invalid(directory / "config.json", f"{key} must be a positive integer, is {value!r}")
    return value


def _ids(value: Any) -> frozenset[int]:
    """One id, several or none."""
    if value is None:
        return frozenset()
    return frozenset(value if isinstance(value, list) else [value])


def _content(token: Any) -> str | None:
    """A special token is written as a string, or as an object with its content."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def _special_tokens(tokenizer: Mapping[str, Any]) -> dict[str, str]:
    named = {name: _content(tokenizer.get(name)) for name in _SPECIAL_TOKEN_NAMES}
    return {name: content for name, content in named.items() if content is not None}


def _extra_special_tokens(tokenizer: Mapping[str, Any]) -> tuple[str, ...]:
    extra = tokenizer.get("extra_special_tokens") or tokenizer.get("additional_special_tokens") or []
    contents = map(_content, extra.values() if isinstance(extra, dict) else extra)
    return tuple(content for content in contents if content is not None)


def _chat_template(directory: Path, tokenizer: Mapping[str, Any]) -> str | None:
    """A file of its own wins over the one in tokenizer_config.json, of which several named ones may exist."""
    path = directory / "chat_template.jinja"
    if path.exists():
        return _read_text(path)
    template = tokenizer.get("chat_template")
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    return template if isinstance(template, str) else None
