"""Fill-in-the-middle: how a model is shown what stands before and after the text that it is to write.

The tokens that a tokenizer has say how it was trained (Bavarian et al. 2022, and each model's own
page). No text of a request becomes one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

TokenOf = Callable[[str], int | None]


@dataclass(frozen=True, slots=True)
class InfillFormat:
    """The tokens before the prefix, before the suffix, and where the middle begins.

    `suffix_first`: the suffix stands before the prefix, whose end the middle continues. `bare`: a
    SentencePiece vocabulary, which would put a space before the suffix. `ends` are the tokens that
    end a middle, besides those that end every answer.
    """

    prefix: str
    suffix: str
    middle: str
    suffix_first: bool = False
    bare: bool = False
    ends: tuple[str, ...] = ()


FORMATS: Sequence[InfillFormat] = (
    # Qwen 2.5 Coder, CodeGemma
    InfillFormat(
        "<|fim_prefix|>",
        "<|fim_suffix|>",
        "<|fim_middle|>",
        ends=("<|fim_pad|>", "<|file_sep|>", "<|file_separator|>", "<|repo_name|>", "<|endoftext|>"),
    ),
    # StarCoder, Granite Code
    InfillFormat(
        "<fim_prefix>", "<fim_suffix>", "<fim_middle>", ends=("<fim_pad>", "<file_sep>", "<repo_name>", "<|endoftext|>")
    ),
    # SantaCoder
    InfillFormat("<fim-prefix>", "<fim-suffix>", "<fim-middle>", ends=("<fim-pad>", "<|endoftext|>")),
    # DeepSeek Coder
    InfillFormat("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>", ends=("<|EOT|>", "<｜end▁of▁sentence｜>")),  # noqa: RUF001
    # CodeLlama
    InfillFormat("▁<PRE>", "▁<SUF>", "▁<MID>", bare=True, ends=("▁<EOT>",)),
    # Codestral; the suffix comes first, and nothing stands where the middle begins
    InfillFormat("[PREFIX]", "[SUFFIX]", "", suffix_first=True, bare=True),
)


@dataclass(frozen=True, slots=True)
class Infill:
    """A prompt whose answer is the middle, and the tokens that end it."""

    token_ids: list[int]
    stop_token_ids: list[int]


def format_of(token_of: TokenOf) -> InfillFormat | None:
    """Returns the format whose tokens the tokenizer has, if any."""
    for each in FORMATS:
        if all(token_of(name) is not None for name in (each.prefix, each.suffix, each.middle) if name):
            return each
    return None


def arranged(
    each: InfillFormat, prefix: str, suffix: str, token_of: TokenOf, encode: Callable[[str, bool], list[int]]
) -> Infill:
    """Returns the prompt, without what the tokenizer puts around a text.

    `encode` returns a text's tokens; True: without a space that the vocabulary puts before it.
    """

    def mark(name: str) -> list[int]:
        found = token_of(name) if name else None
        return [] if found is None else [found]

    before = mark(each.prefix) + encode(prefix, each.bare and not each.suffix_first)
    after = mark(each.suffix) + encode(suffix, each.bare)
    parts = after + before if each.suffix_first else before + after
    ends = [token_id for name in each.ends for token_id in mark(name)]
    return Infill(parts + mark(each.middle), ends)
