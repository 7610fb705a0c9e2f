"""How texts are split before byte-pair merges: llama.cpp's names (`tokenizer.ggml.pre`) and the patterns.

A wrong split costs quality and nothing else tells of it: unknown names and patterns are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ryzanstein.worker.refusal import CheckpointError, excerpt

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


_DEEPSEEK_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376"
    "\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d"
    "\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4"
    "\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139"
    "\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d"
    "\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a"
    "\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2"
    "\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
"""The letters of the first DeepSeek models: those with two cases, as far as a list of them goes."""
_LLAMA3 = Splitting(rf"{_CONTRACTIONS}|{_WORD}\p{{L}}+|\p{{N}}{{1,3}}|{_REST}", whole_words=True)
_GPT2, _DIGITS = Splitting(), Splitting(digits=True)
SPLITTINGS: Mapping[str, Splitting] = {
    "llama-bpe": _LLAMA3,
    "qwen2": Splitting(rf"{_CONTRACTIONS}|{_WORD}\p{{L}}+|\p{{N}}|{_REST}", normalized=True),
    "qwen35": Splitting(
        rf"{_CONTRACTIONS}|{_WORD}[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        normalized=True,
    ),
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
    "deepseek-llm": Splitting(
        patterns=(
            *(
                "[\r\n]",
                rf"\s?[{_DEEPSEEK_LETTERS}]+",
                "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
                r"\s+$",
            ),
            "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
        ),
        digits=True,
    ),
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
        raise CheckpointError(f"{file}: tokenizer.ggml.pre {excerpt(pre)} is not supported, only {known}")
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
        f"{file}: pre_tokenizer with normalizer {excerpt(normalizer)} and ignore_merges {whole_words} is none of "
        f"{', '.join(sorted(SPLITTINGS))}, so GGUF has no name for it: {excerpt(steps)}"
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
