"""How texts are split before byte-pair merges: llama.cpp's names (`tokenizer.ggml.pre`) and the patterns.

A wrong split costs quality and nothing else tells of it: unknown names and patterns are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ryzanstein.worker.model.refusal import CheckpointError, shown

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_REST_WITH_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_WORD = r"[^\r\n\p{L}\p{N}]?"


@dataclass(frozen=True, slots=True)
class Splitting:
    """Steps before merges.

    `pattern` isolates its matches; without one GPT-2's is used; `patterns` do so one after the other.
    `digits`: each digit is a piece. `signs`: runs of signs are pieces first, and three digits last.
    `whole_words`: a piece that is a token is not merged from smaller ones. `normalized`: Unicode
    form NFC first, which llama.cpp leaves out.
    """

    pattern: str | None = None
    patterns: tuple[str, ...] = ()
    digits: bool = False
    signs: bool = False
    whole_words: bool = False
    normalized: bool = False

    def pre_tokenizer(self) -> dict[str, Any]:
        """Returns the pre-tokenizer of tokenizer.json."""
        patterns = self.patterns if self.pattern is None else (self.pattern,)
        to_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": not patterns}
        if self.signs:
            contiguous, numbers = (
                {"type": "Punctuation", "behavior": "Contiguous"},
                {"type": "Digits", "individual_digits": False},
            )
            return {"type": "Sequence", "pretokenizers": [contiguous, to_bytes, numbers, _isolated("[0-9][0-9][0-9]")]}
        splits = list(map(_isolated, patterns))
        digits = [{"type": "Digits", "individual_digits": True}] if self.digits else []
        # Digits are split off before a text is cut into words, and after patterns that know none.
        steps = [*splits, *digits] if self.patterns else [*digits, *splits]
        return {"type": "Sequence", "pretokenizers": [*steps, to_bytes]} if steps else to_bytes


def _isolated(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


_LLAMA3 = Splitting(rf"{_CONTRACTIONS}|{_WORD}\p{{L}}+|\p{{N}}{{1,3}}|{_REST}", whole_words=True)
_GPT2, _DIGITS = Splitting(), Splitting(digits=True)
SPLITTINGS: Mapping[str, Splitting] = {
    "llama-bpe": _LLAMA3,
    "qwen2": Splitting(rf"{_CONTRACTIONS}|{_WORD}\p{{L}}+|\p{{N}}|{_REST}", normalized=True),
    "gpt-2": _GPT2,
    "starcoder": _DIGITS,
    "dbrx": Splitting(_LLAMA3.pattern),
    "tekken": Splitting(rf"{_WORD}{_UPPER}*{_LOWER}+|{_WORD}{_UPPER}+{_LOWER}*|\p{{N}}|{_REST_WITH_SLASH}", whole_words=True),
    "gpt-4o": Splitting(
        rf"{_WORD}{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|{_WORD}{_UPPER}+{_LOWER}*{_CONTRACTIONS}?|"
        rf"\p{{N}}{{1,3}}|{_REST_WITH_SLASH}"
    ),
    "mpt": Splitting(normalized=True),
    "falcon": Splitting(signs=True),
    "bloom": Splitting(" ?[^(\\s|[.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c])]+"),
    "deepseek-coder": Splitting(
        patterns=("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"), digits=True
    ),
    "deepseek-v3": Splitting(
        patterns=(
            r"\p{N}{1,3}",
            "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
            r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|"""
            "[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
        )
    ),
}
"""The splittings by the name under which they are written."""

_SYNONYMS: Mapping[str, str] = {
    "llama3": "llama-bpe",
    "llama-v3": "llama-bpe",
    "olmo": "mpt",
    "phi-2": "gpt-2",
    "deepseek-r1-qwen": "qwen2",
    "stablelm2": "qwen2",
    "falcon3": "llama-bpe",
    "refact": "starcoder",
    "command-r": "starcoder",
    "smollm": "starcoder",
    "smaug-bpe": "dbrx",
}


def splitting_of(pre: str, file: str) -> Splitting:
    """Returns the splitting of this name. Raises CheckpointError for an unknown one."""
    found = SPLITTINGS.get(_SYNONYMS.get(pre, pre))
    if found is None:
        known = ", ".join((*sorted(_SYNONYMS), *sorted(SPLITTINGS)))
        raise CheckpointError(f"{file}: tokenizer.ggml.pre {shown(pre)} is not supported, only {known}")
    return found


def name_of(tokenizer: Mapping[str, Any], file: str) -> str:
    """Returns the name of what tokenizer.json does before merges. Raises CheckpointError if it has none."""
    steps, whole_words = _steps(tokenizer.get("pre_tokenizer")), bool(tokenizer["model"].get("ignore_merges"))
    normalizer = _without_nothing(tokenizer.get("normalizer"))
    for name, splitting in SPLITTINGS.items():
        allowed = (None, {"type": "NFC"}) if splitting.normalized else (None,)
        if _steps(splitting.pre_tokenizer()) == steps and splitting.whole_words == whole_words and normalizer in allowed:
            return name
    raise CheckpointError(
        f"{file}: pre_tokenizer with normalizer {shown(normalizer)} and ignore_merges {whole_words} is none of "
        f"{', '.join(sorted(SPLITTINGS))}, so GGUF has no name for it: {shown(steps)}"
    )


def _without_nothing(normalizer: Any) -> Any:
    """Returns a normalizer; None for an empty sequence of them."""
    return None if isinstance(normalizer, dict) and normalizer.get("normalizers") == [] else normalizer


def _steps(pre_tokenizer: Any) -> list[tuple[Any, ...]]:
    """Returns a pre-tokenizer as a list of its steps, without what changes no token."""
    if not isinstance(pre_tokenizer, dict):
        return []
    if pre_tokenizer.get("type") == "Sequence":
        return [step for each in pre_tokenizer.get("pretokenizers", ()) for step in _steps(each)]
    return [_step(pre_tokenizer)]


def _step(pre_tokenizer: Mapping[str, Any]) -> tuple[Any, ...]:
    match pre_tokenizer.get("type"):
        case "ByteLevel":
            return ("bytes", pre_tokenizer.get("add_prefix_space", True), pre_tokenizer.get("use_regex", True))
        case "Punctuation":
            return ("signs", pre_tokenizer.get("behavior"))
        case "Digits":
            return ("digits", pre_tokenizer.get("individual_digits", False))
        case "Split":
            pattern = pre_tokenizer.get("pattern")
            kinds = pre_tokenizer.get("behavior"), pre_tokenizer.get("invert", False)
            return ("split", pattern.get("Regex") if isinstance(pattern, dict) else pattern, *kinds)
    return (pre_tokenizer.get("type"),)
