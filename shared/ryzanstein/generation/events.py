"""The events of a generation, as its readers get them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ryzanstein.generation.reply_format import ReplyFormat
from ryzanstein.generation.tokens import FinishReason, Token, TopLogprob, Usage

MAX_PROMPT_SCORES = 262_144
"""Log probabilities of one prompt: its tokens, times one and the alternatives of each."""


@dataclass(frozen=True, slots=True)
class Started:
    """The event that a node has accepted the generation.

    `omitted_prompt_tokens` were left out of a prompt that did not fit.
    `reply` None: the text of its answers is content alone.
    """

    generation_id: str
    model: str
    node_id: str
    prompt_tokens: int
    created: int = 0
    shown_as: str = ""
    reply: ReplyFormat | None = None
    omitted_prompt_tokens: int = 0


class PromptToken(NamedTuple):
    """One token of a prompt. `logprob` is None for the first, which nothing precedes."""

    token_id: int
    text: str
    logprob: float | None
    top: tuple[TopLogprob, ...] = ()


class PromptScores(NamedTuple):
    """Tokens of the prompt with their log probabilities: first_index, first_index + 1, ..."""

    first_index: int
    tokens: Sequence[PromptToken]


class Delta(NamedTuple):
    """New tokens of one choice: first_index, first_index + 1, ..."""

    choice: int
    first_index: int
    tokens: Sequence[Token]
    node_id: str

    @property
    def text(self) -> str:
        return "".join(token.text for token in self.tokens)


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of one choice."""

    choice: int
    reason: FinishReason
    usage: Usage


GenerationEvent = Started | PromptScores | Delta | Finished
