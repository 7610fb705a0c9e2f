"""What an engine is asked to compute, and what comes back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ryzanstein.generation.request import SamplingParams


@dataclass(frozen=True, slots=True)
class AskedChoice:
    """One choice that an engine is asked to compute on.

    `token_ids` are the prompt's and those generated so far; the first `num_prompt` are the prompt. `max_tokens` and
    `min_tokens` are what is left of them. `stop_token_ids` end the answer, the model's own among them. `seed` is of this
    choice. `salt` keeps what it leaves in a prefix cache from requests with another one; empty: shared. `request_id` names
    it in the engine's log. `arguments` are those of our own sampler in the engine, which then decides the tokens.
    """

    token_ids: Sequence[int]
    num_prompt: int
    sampling: SamplingParams
    seed: int
    max_tokens: int
    min_tokens: int
    stop_token_ids: Sequence[int]
    salt: str = ""
    request_id: str = ""
    arguments: Mapping[str, str] | None = None

    @property
    def num_generated(self) -> int:
        """Returns how many of the tokens were generated."""
        return len(self.token_ids) - self.num_prompt

    def after(self, token_ids: Sequence[int]) -> AskedChoice:
        """Returns what is left to ask for when these tokens were generated too."""
        return replace(
            self,
            token_ids=[*self.token_ids, *token_ids],
            max_tokens=self.max_tokens - len(token_ids),
            min_tokens=max(self.min_tokens - len(token_ids), 0),
        )


@dataclass(frozen=True, slots=True)
class ComputedToken:
    """A token. `logprob` is the model's natural log probability; None: not asked, or not known for this token.

    `top` are the likeliest tokens, likeliest first.
    """

    token_id: int
    logprob: float | None = None
    top: Sequence[tuple[int, float]] = ()


@dataclass(frozen=True, slots=True)
class ComputedPart:
    """What one event of the stream has.

    `finish`: why the engine ended, "" while it goes on ("stop", "length", or the engine's own word); `stop_token`: the stop
    token that ended it where the engine says which. `cached_tokens` of the prompt were cached, where the engine says so.
    `prompt_computed` tokens of it are computed, where the engine reports it. `num_prompt` is how many the engine counts in
    the prompt, `num_generated` how many it has generated so far, these among them; None: it does not say. `text` is what
    the event's tokens stand for, where it may be needed (see `gaps`).
    """

    tokens: Sequence[ComputedToken] = ()
    finish: str = ""
    cached_tokens: int | None = None
    prompt_computed: int | None = None
    stop_token: int | None = None
    num_prompt: int | None = None
    num_generated: int | None = None
    text: str = ""
