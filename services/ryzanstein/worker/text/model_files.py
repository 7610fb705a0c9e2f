"""Reads what the text side needs from a model directory in the Hugging Face layout, or a GGUF file.

Every error names the file. The ranks read the weights.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ryzanstein import errors
from ryzanstein.errors import RyzansteinError
from ryzanstein.files.model_paths import is_gguf
from ryzanstein.generation.request import NAMES, SamplingDefaults, in_bounds
from ryzanstein.worker.architectures.registry import context_of, values_of
from ryzanstein.worker.architectures.text_half import text_half
from ryzanstein.worker.checkpoints.chat_templates import templates_of
from ryzanstein.worker.json_files import MAX_JSON_BYTES, UnreadableFile, parse_object, read_bytes
from ryzanstein.worker.refusal import CheckpointError, ModelRefused, bounded, excerpt
from ryzanstein.worker.text.embedding import EmbeddingModel

MAX_TEMPLATE_BYTES = 4 * 2**20
"""The size limit of a file with a chat template: what its characters may take in UTF-8."""
MAX_TOKENIZER_BYTES = 256 * 2**20
"""The size limit of tokenizer.json. Those of vocabularies of 256 k tokens have 33 MB."""

_OTHER_TOKENIZERS = ("tekken.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tiktoken.model")
FLAGS = ("lstrip", "rstrip", "single_word", "normalized", "special")
"""What an added token is besides its text."""
_SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The content of the files; `special_tokens` by name (bos_token, eos_token, ...).

    `added_tokens` are those of tokenizer_config.json by id, whose flags count before tokenizer.json's.
    `tool_template` is the chat template of conversations with tools, where that is another one.
    `embedding` says how the model makes vectors; None: it generates text. `template_file` is a file
    that an operator named instead of the model's own chat template. `generation` is what
    generation_config.json has, or a GGUF file's metadata.
    """

    directory: Path
    tokenizer_json: str
    context_length: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    special_tokens: Mapping[str, str]
    extra_special_tokens: tuple[str, ...]
    chat_template: str | None
    tool_template: str | None = None
    added_tokens: tuple[tuple[int, Mapping[str, Any]], ...] = ()
    embedding: EmbeddingModel | None = None
    template_file: Path | None = None
    generation: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, directory: Path, template_file: Path | None = None) -> ModelFiles:
        """Reads the files of a directory, or a GGUF file; the chat template from `template_file` if there is one.

        Raises FAILED_PRECONDITION with reason MODEL_INVALID, naming the file that is missing or
        wrong.
        """
        files = cls._of_gguf(directory) if is_gguf(directory) else cls._of_directory(directory)
        if template_file is None:
            return files
        template = _read_text(template_file, MAX_TEMPLATE_BYTES)
        return replace(files, chat_template=template, tool_template=None, template_file=template_file)

    @classmethod
    def _of_directory(cls, directory: Path) -> ModelFiles:
        config = _read_json(directory / "config.json")
        generation = _read_json(directory / "generation_config.json", required=False)
        tokenizer = _read_json(directory / "tokenizer_config.json", required=False)
        templates = _chat_templates(directory, tokenizer)
        text_config = _text_config(config, directory / "config.json")
        values = values_of(text_config)
        context_length = _count(lambda: context_of(text_config), directory)
        vocab_size = _count(lambda: values.count("vocab_size"), directory)
        return cls(
            directory=directory,
            tokenizer_json=_tokenizer_json(directory),
            context_length=context_length,
            vocab_size=vocab_size,
            eos_token_ids=_ids(text_config, directory / "config.json", vocab_size)
            | _ids(generation, directory / "generation_config.json", vocab_size),
            special_tokens=_special_tokens(tokenizer),
            extra_special_tokens=_extra_special_tokens(tokenizer),
            added_tokens=_added_tokens(tokenizer),
            chat_template=templates.get("default"),
            tool_template=templates.get("tool_use"),
            embedding=EmbeddingModel.read(directory, config),
            generation=generation,
        )

    @classmethod
    def _of_gguf(cls, path: Path) -> ModelFiles:
        """Makes what a directory would contain from the vocabulary and metadata of a GGUF file."""
        from ryzanstein.worker.checkpoints.gguf.description import GgufDescription
        from ryzanstein.worker.checkpoints.gguf.file import GgufFile
        from ryzanstein.worker.checkpoints.gguf.sampling import sampling_of
        from ryzanstein.worker.checkpoints.gguf.tokenizer.conversion import generation_config, tokenizer_config, tokenizer_json

        try:
            with GgufFile.open(path) as file:
                description = GgufDescription.of(file)
                vocabulary = description.vocabulary(file)
                sampling = sampling_of(file.metadata)
            tokenizer = json.dumps(tokenizer_json(vocabulary, str(path)))
        except (ModelRefused, OSError) as error:
            raise errors.failed_precondition("MODEL_INVALID", bounded(str(error))) from error
        context_length = _count(lambda: context_of(description.config), path)
        vocab_size: int = description.config["vocab_size"]
        settings = tokenizer_config(vocabulary, context_length)
        return cls(
            directory=path,
            tokenizer_json=tokenizer,
            context_length=context_length,
            vocab_size=vocab_size,
            eos_token_ids=_ids(generation_config(vocabulary), path, vocab_size),
            special_tokens=_special_tokens(settings),
            extra_special_tokens=_extra_special_tokens(settings),
            chat_template=vocabulary.chat_template,
            tool_template=vocabulary.tool_template,
            generation=sampling,
        )


def sampling_defaults(files: ModelFiles) -> SamplingDefaults:
    """Returns the values of parameters in generation_config.json. MODEL_INVALID: no request could have one of them."""
    given = {name: value for name in NAMES if (value := files.generation.get(name)) is not None}
    if isinstance(given.get("top_k"), int) and given["top_k"] < 0:
        given["top_k"] = 0  # as 0, it means no limit
    for name, value in given.items():
        whole = isinstance(value, int) and not isinstance(value, bool)
        if not (whole or (isinstance(value, float) and name != "top_k")) or not in_bounds(name, value):
            raise _wrong_default(files, name, value)
    return SamplingDefaults(**given)


def answer_tokens(files: ModelFiles) -> int | None:
    """Returns how many tokens an answer has at most where a request does not say it, as vLLM reads it. MODEL_INVALID."""
    value = files.generation.get("max_new_tokens")
    if value is not None and (type(value) is not int or value < 1):
        raise _wrong_default(files, "max_new_tokens", value)
    return value


def _wrong_default(files: ModelFiles, name: str, value: Any) -> RyzansteinError:
    path = files.directory if is_gguf(files.directory) else files.directory / "generation_config.json"
    return model_invalid(path, f"{name} cannot be {excerpt(value)}: correct it, or set generation_config none")


def model_invalid(path: Path, what: str) -> RyzansteinError:
    """Returns the error for a model directory that cannot be served; retrying does not help."""
    return errors.failed_precondition("MODEL_INVALID", bounded(f"{path}: {what}"))


def _read_text(path: Path, most: int = MAX_JSON_BYTES) -> str:
    try:
        return read_bytes(path, most).decode("utf-8")
    except (UnreadableFile, UnicodeDecodeError) as error:
        raise model_invalid(path, str(error)) from error


def _tokenizer_json(directory: Path) -> str:
    path = directory / "tokenizer.json"
    other = next((name for name in _OTHER_TOKENIZERS if (directory / name).exists()), None)
    if other is not None and not os.path.lexists(path):
        remedy = "save it as tokenizer.json with save_pretrained of transformers' AutoTokenizer"
        raise model_invalid(path, f"No such file or directory. {other} exists, but its format is not read: {remedy}")
    return _read_text(path, MAX_TOKENIZER_BYTES)


def _read_json(path: Path, *, required: bool = True) -> dict[str, Any]:
    if not required and not os.path.lexists(path):
        return {}
    try:
        return parse_object(_read_text(path))
    except UnreadableFile as error:
        raise model_invalid(path, str(error)) from error


def _text_config(config: dict[str, Any], path: Path) -> dict[str, Any]:
    """Returns the configuration; what a multimodal model says of its decoder takes precedence."""
    nested = config.get("text_config", {})
    if not isinstance(nested, dict):
        raise model_invalid(path, f"text_config must be an object, got {excerpt(nested)}")
    half = text_half(config)
    return {**config, **nested} if half is config else dict(half)


def _count(read: Callable[[], int], directory: Path) -> int:
    try:
        return read()
    except CheckpointError as error:
        raise errors.failed_precondition("MODEL_INVALID", bounded(f"{directory}/{error}")) from error


def _ids(config: Mapping[str, Any], path: Path, vocab_size: int) -> frozenset[int]:
    """Returns what `eos_token_id` says: one id, several or none."""
    value = config.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(_is_id(token_id, vocab_size) for token_id in ids):
        what = f"must be a token id in [0, {vocab_size}), or a list of them, got {excerpt(value)}"
        raise model_invalid(path, f"eos_token_id {what}")
    return frozenset(ids)


def _is_id(value: object, vocab_size: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < vocab_size


def _content(token: Any) -> str | None:
    """Returns the content of a special token.

    The token is written as a string, or as an object with its content.
    """
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def _special_tokens(tokenizer: Mapping[str, Any]) -> dict[str, str]:
    named = {name: _content(tokenizer.get(name)) for name in _SPECIAL_TOKEN_NAMES}
    return {name: content for name, content in named.items() if content is not None}


def _extra_special_tokens(tokenizer: Mapping[str, Any]) -> tuple[str, ...]:
    extra = tokenizer.get("extra_special_tokens") or tokenizer.get("additional_special_tokens") or []
    named = extra.values() if isinstance(extra, dict) else extra if isinstance(extra, list) else ()
    contents = map(_content, named)
    return tuple(content for content in contents if content is not None)


def _added_tokens(tokenizer: Mapping[str, Any]) -> tuple[tuple[int, Mapping[str, Any]], ...]:
    """Returns the tokens of `added_tokens_decoder` with their ids, as far as they are written as transformers does."""
    table = tokenizer.get("added_tokens_decoder")
    entries = table.items() if isinstance(table, dict) else ()
    return tuple((int(key), entry) for key, entry in entries if key.isdecimal() and _is_added(entry))


def _is_added(entry: Any) -> bool:
    return _content(entry) is not None and isinstance(entry, dict) and all(type(entry.get(flag)) is bool for flag in FLAGS)


def _chat_templates(directory: Path, tokenizer: Mapping[str, Any]) -> dict[str, str]:
    """Returns the chat templates by name, as transformers finds them.

    Separate files take precedence over tokenizer_config.json, which has one or several named ones. Where there is
    neither, that of the processor of a multimodal model counts.
    """
    paths = {"default": directory / "chat_template.jinja"}
    paths |= {path.stem: path for path in sorted(directory.glob("additional_chat_templates/*.jinja"))}
    found = {name: _read_text(path, MAX_TEMPLATE_BYTES) for name, path in paths.items() if path.exists()}
    written = tokenizer.get("chat_template") or _read_json(directory / "chat_template.json", required=False).get(
        "chat_template"
    )
    return templates_of(written) | found
