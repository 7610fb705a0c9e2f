"""The tags between which models reason, by the name that a node gives them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from ryzanstein.generation.reply_format import THINK

HARMONY = "harmony"
"""The name of gpt-oss' channels, which are no tags."""


@dataclass(frozen=True, slots=True)
class Tags:
    """What stands before and after reasoning, and around the answer behind it, if anything does."""

    begin: str
    end: str
    answer: tuple[str, str] = ("", "")

    @property
    def texts(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.begin, self.end, *self.answer)))


TAGS: Mapping[str, Tags] = MappingProxyType(
    {
        THINK: Tags("<think>", "</think>"),
        "answer": Tags("<think>", "</think>", ("<answer>", "</answer>")),
        "response": Tags("<think>", "</think>", ("<response>", "</response>")),
        "mistral": Tags("[THINK]", "[/THINK]"),
        "seed": Tags("<seed:think>", "</seed:think>"),
        "cohere": Tags("<|START_THINKING|>", "<|END_THINKING|>", ("<|START_RESPONSE|>", "<|END_RESPONSE|>")),
        "gemma4": Tags("<|channel>thought", "<channel|>"),
    }
)
REASONING = (*TAGS, HARMONY)
"""All names of tags that are read here."""
