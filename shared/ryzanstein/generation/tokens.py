"""What a node says of an answer: its tokens, why it ended, how many tokens that took."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ryzanstein.open_enum import OpenEnum


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
