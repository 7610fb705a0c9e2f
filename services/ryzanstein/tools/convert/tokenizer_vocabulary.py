"""The files of a tokenizer in the Hugging Face layout as the vocabulary of a GGUF file."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from ryzanstein.worker.checkpoints.chat_templates import templates_of
from ryzanstein.worker.checkpoints.gguf.tokenizer.conversion import SPACE
from ryzanstein.worker.checkpoints.gguf.tokenizer.score_merges import scores_of
from ryzanstein.worker.checkpoints.gguf.tokenizer.splitting import name_of
from ryzanstein.worker.checkpoints.gguf.tokenizer.vocabulary import BPE, SENTENCEPIECE, SPACED_BPE, GgufVocabulary, TokenType
from ryzanstein.worker.json_files import UnreadableFile, parse_object, read_bytes
from ryzanstein.worker.refusal import CheckpointError, excerpt

MAX_TOKENIZER_BYTES = 256 * 2**20
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
_CONTROL_SCORE = -1000.0
_SPECIAL_NAMES = {"bos": "bos_token", "eos": "eos_token", "unk": "unk_token", "sep": "sep_token", "pad": "pad_token"}


def read_vocabulary(model_dir: Path, num_rows: int) -> GgufVocabulary:
    """Returns the vocabulary of a checkpoint whose embedding has `num_rows` rows.

    Raises CheckpointError, which names the file and what GGUF cannot express.
    """
    tokenizer = _read(model_dir / "tokenizer.json", MAX_TOKENIZER_BYTES)
    config = _read(model_dir / "tokenizer_config.json") if (model_dir / "tokenizer_config.json").exists() else {}
    templates = templates_of(config.get("chat_template"))
    files = {
        "default": model_dir / "chat_template.jinja",
        "tool_use": model_dir / "additional_chat_templates" / "tool_use.jinja",
    }
    if any(path.exists() for path in files.values()):
        templates = {name: _text(path) for name, path in files.items() if path.exists()}
    generation_file = model_dir / "generation_config.json"
    generation = _read(generation_file) if generation_file.exists() else {}
    vocabulary = _Tokenizer(tokenizer, config, generation, str(model_dir / "tokenizer.json")).vocabulary(num_rows)
    return replace(vocabulary, chat_template=templates.get("default"), tool_template=templates.get("tool_use"))


class _Tokenizer:
    """The parsed files of one tokenizer; `file` is the name of tokenizer.json for messages."""

    def __init__(
        self, tokenizer: Mapping[str, Any], config: Mapping[str, Any], generation: Mapping[str, Any], file: str
    ) -> None:
        self._tokenizer, self._config, self._generation, self._file = tokenizer, config, generation, file
        model = tokenizer.get("model")
        if not isinstance(model, dict) or model.get("type") != "BPE":
            kind = model.get("type") if isinstance(model, dict) else model
            self._refuse(f"model {excerpt(kind)} is not supported, only BPE")
        self._model = model
        self._ids: Mapping[str, int] = model.get("vocab", {})
        self._added = {token["id"]: token for token in tokenizer.get("added_tokens", ())}

    def vocabulary(self, num_rows: int) -> GgufVocabulary:
        """Returns the vocabulary, with an unused token for every id of the embedding that has none."""
        texts = {token_id: text for text, token_id in self._ids.items()}
        texts |= {token_id: token["content"] for token_id, token in self._added.items()}
        if not texts or max(texts) >= num_rows:
            self._refuse(f"the largest token id is {max(texts, default='missing')}, the embedding has {num_rows} rows")
        tokens = tuple(texts.get(token_id, f"[PAD{token_id}]") for token_id in range(num_rows))
        types = tuple(self._type(token_id, texts) for token_id in range(num_rows))
        sentencepiece = bool(self._model.get("byte_fallback"))
        before, after = self._around()
        scores = self._scores(tokens, types) if sentencepiece else ()
        return GgufVocabulary(
            model=SENTENCEPIECE if scores else SPACED_BPE if sentencepiece else BPE,
            pre="default" if sentencepiece else name_of(self._tokenizer, self._file),
            tokens=tokens,
            types=types,
            scores=scores,
            merges=() if scores else tuple(" ".join(pair) for pair in self._merges()),
            special=self._special(),
            add_bos=before,
            add_eos=after,
            add_space_prefix=sentencepiece and self._has_space_prefix(),
        )

    def _refuse(self, what: str) -> NoReturn:
        raise CheckpointError(f"{self._file}: {what}")

    def _type(self, token_id: int, texts: Mapping[int, str]) -> TokenType:
        text, added = texts.get(token_id), self._added.get(token_id)
        if text is None:
            return TokenType.UNUSED
        if text == self._model.get("unk_token"):
            return TokenType.UNKNOWN
        if added is not None:
            return TokenType.CONTROL if added.get("special") else TokenType.USER_DEFINED
        return TokenType.BYTE if self._model.get("byte_fallback") and _BYTE.fullmatch(text) else TokenType.NORMAL

    def _merges(self) -> list[Sequence[str]]:
        merges = self._model.get("merges", ())
        return [merge.split(" ", 1) if isinstance(merge, str) else merge for merge in merges]

    def _scores(self, tokens: Sequence[str], types: Sequence[TokenType]) -> tuple[float, ...]:
        """Returns the scores of tokens; none where only a list of merges has their order, as Gemma 4's does."""
        pieces = {text: token_id for token_id, text in enumerate(tokens) if types[token_id] == TokenType.NORMAL}
        scores = scores_of(self._merges(), pieces)
        if scores is None and not self._has_space_prefix():
            return ()
        if scores is None:
            self._refuse(
                "its merges are not in the order of scores of their results, which is all that GGUF can store for them "
                "where a text gets a space before it"
            )
        special = {TokenType.BYTE: 0.0, TokenType.UNKNOWN: 0.0}
        return tuple(
            scores[text] if kind == TokenType.NORMAL else special.get(kind, _CONTROL_SCORE)
            for text, kind in zip(tokens, types, strict=True)
        )

    def _has_space_prefix(self) -> bool:
        """Returns whether a text gets a space before it, and refuses normalizers that do anything else."""
        steps = _flat(self._tokenizer.get("normalizer"), "normalizers") + [
            step for step in _flat(self._tokenizer.get("pre_tokenizer"), "pretokenizers") if not _splits_nothing(step)
        ]
        prefix = False
        for step in steps:
            match step:
                case {"type": "Prepend", "prepend": text} if text == SPACE:
                    prefix = True
                case {"type": "Replace", "pattern": {"String": " "}, "content": text} if text == SPACE:
                    pass
                case {"type": "Metaspace", "replacement": text, "prepend_scheme": scheme} if text == SPACE:
                    prefix = prefix or scheme != "never"
                case _:
                    self._refuse(f"GGUF has no name for the step {excerpt(step)} before merges")
        return prefix

    def _around(self) -> tuple[bool, bool]:
        """Returns whether a text begins with the token that begins texts, and ends with the one that ends them."""
        steps = [
            step
            for step in _flat(self._tokenizer.get("post_processor"), "processors")
            if step.get("type") == "TemplateProcessing"
        ]
        if not steps:
            return False, False
        single = [next(iter(piece)) for piece in steps[0].get("single", ())]
        place = single.index("Sequence") if "Sequence" in single else 0
        return place > 0, place < len(single) - 1

    def _special(self) -> dict[str, int]:
        contents = {token["content"]: token_id for token_id, token in self._added.items()}
        found = {}
        for name, key in _SPECIAL_NAMES.items():
            value = self._config.get(key)
            text = value.get("content") if isinstance(value, dict) else value
            token_id = contents.get(text, self._ids.get(text)) if isinstance(text, str) else None
            if token_id is not None:
                found[name] = token_id
        return found | self._ends(found.get("eos"))

    def _ends(self, known: int | None) -> dict[str, int]:
        """Returns what ends an answer: the file has one id for a text's end and one for a turn's."""
        listed = self._generation.get("eos_token_id")
        ids = listed if isinstance(listed, list) else [] if listed is None else [listed]
        ids = [token_id for token_id in ids if token_id != known]
        if known is None:
            return dict(zip(("eos", "eot"), ids, strict=False))
        return {"eot": ids[0]} if ids else {}


def _flat(step: Any, key: str) -> list[dict[str, Any]]:
    """Returns the steps of a sequence, or the one step, or none."""
    if not isinstance(step, dict):
        return []
    return [each for inner in step.get(key, ()) for each in _flat(inner, key)] if step.get("type") == "Sequence" else [step]


def _splits_nothing(step: Mapping[str, Any]) -> bool:
    """Returns whether this is Gemma's split at spaces, which are none by then."""
    return step.get("type") == "Split" and step.get("pattern") == {"String": " "}


def _read(path: Path, most: int = 64 * 2**20) -> dict[str, Any]:
    try:
        return parse_object(read_bytes(path, most))
    except UnreadableFile as error:
        raise CheckpointError(f"{path}: {error}") from error


def _text(path: Path) -> str:
    try:
        return read_bytes(path).decode()
    except (UnreadableFile, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: {error}") from error
