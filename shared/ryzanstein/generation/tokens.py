"""What a node says of an answer: its tokens, why it ended, how many tokens that took. And the events that readers get of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ryzanstein.cluster import OpenEnum
from ryzanstein.generation.reply_format import ReplyFormat

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
    answer_form: str = ""
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


class NodeMove(NamedTuple):
    """How an answer came from one node to another. `silence_s` is the time without a token, at the router."""

    from_node_id: str
    cause: str
    silence_s: float
    attempt: int


class Delta(NamedTuple):
    """New tokens of one choice: first_index, first_index + 1, ...

    `moved`: the tokens before are another node's, and how it came to that is known.
    """

    choice: int
    first_index: int
    tokens: Sequence[Token]
    node_id: str
    moved: NodeMove | None = None

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


class FinishReason(OpenEnum):
    """Why a choice ended, with the numbers of inference.proto.

    UNSPECIFIED: a reason that only a newer node knows. TOOL_CALLS is how a face shows a STOP after
    calls of functions: no node and no log has it.
    """

    UNSPECIFIED = 0
    STOP = 1
    LENGTH = 2
    CANCELLED = 3
    TOOL_CALLS = 4


class TopLogprob(NamedTuple):
    """One of the likeliest tokens. `text` and `token_bytes` are as in `TokenLogprobs`."""

    token_id: int
    text: str
    logprob: float
    token_bytes: bytes | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural log probabilities of a token and of the likeliest tokens, likeliest first.

    `text` is the token alone, or the name of a special token. `token_bytes` is what the token adds
    to the text: part of a character for some tokens, nothing for special ones. The bytes of all
    tokens together are the text before a stop string cut it. None: the node's version does not
    report it.
    """

    logprob: float
    top: tuple[TopLogprob, ...] = ()
    text: str | None = None
    token_bytes: bytes | None = None


class Token(NamedTuple):
    """One generated token. `text` is what became certain with it, often empty for half a character.

    It is a tuple, like `Delta`: there is one for each token of each frame, and a frozen dataclass
    takes three times as long to create.
    """

    token_id: int
    text: str
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts over all choices."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_prompt_tokens: int = 0
    omitted_prompt_tokens: int = 0
