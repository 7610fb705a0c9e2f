"""What a dialect is, and a server that speaks one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import msgspec

from ryzanstein.generation.request import CACHE_SCOPES
from ryzanstein.worker.engines.remote.asked import AskedChoice, ComputedPart
from ryzanstein.worker.engines.remote.http.faults import EngineProtocolError, clean

NEVER = frozenset({"constraint", "prompt_logprobs", "bad_words", "embeddings"})
"""What is asked of no server by itself: constraints are not continued from a prompt, bad words and the scores of prompts are
defined by our tokens. Embeddings come from our own engine.
"""
EXACT = frozenset({"bad_words"})
"""What our own sampler adds to a server that has it."""
CONSTRAINT = frozenset({"constraint"})
"""What it adds if it has the same llguidance as the node."""
NO_CACHE_SCOPES = CACHE_SCOPES
"""The feature that servers lack whose prefix cache is one for all requests."""

Event = TypeVar("Event", bound=msgspec.Struct)


class EngineDialect(Protocol):
    """How one kind of server is spoken to. It keeps nothing between calls.

    `unsupported` are the names of fields of SamplingParams and of features that the server lacks, or to which it gives another
    meaning. `loses_ids`: its streams may leave out the ids of tokens, see `gaps`.
    """

    name: str
    unsupported: frozenset[str]
    loses_ids: bool

    def body(self, asked: AskedChoice, served: ServedEngine) -> tuple[str, dict[str, object]]:
        """Returns the path and the JSON of a request that streams.

        Every field is sent: servers fill those that are not with the model's values, or with their own.
        """
        ...

    def part(self, event: bytes, seen: int = 0) -> ComputedPart | None:
        """Returns what an event's data says; None: nothing. `seen` tokens of the answer are known already.

        Raises EngineProtocolError, or what an error means that the server reports (see `faults`).
        """
        ...


@dataclass(frozen=True, slots=True)
class ServedEngine:
    """A server as it was found. Numbers are 0 where it does not tell them.

    `model` is the name under which it has the model, empty where it needs none. `max_sequences` is what it runs at once,
    `context_length` what prompt and answer may have together. `max_logprobs` are the likeliest tokens that it tells.
    `exact`: our own sampler in it decides the tokens, so that an answer goes on as it would have elsewhere. `constrains`: that
    is so with a constraint, too.
    """

    dialect: EngineDialect
    version: str
    model: str
    context_length: int
    max_sequences: int
    max_logprobs: int
    vocabulary: int = 0
    exact: bool = False
    constrains: bool = False

    @property
    def unsupported(self) -> frozenset[str]:
        """What it cannot do; see `EngineDialect`."""
        added = (EXACT if self.exact else frozenset()) | (CONSTRAINT if self.constrains else frozenset())
        return self.dialect.unsupported - added


def decoded(event: bytes, kind: type[Event]) -> Event:
    """Returns an event's JSON as this type. Raises EngineProtocolError."""
    try:
        return msgspec.json.decode(event, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise EngineProtocolError(f"an event is not as it must be ({clean(str(error))}): {clean(event)}") from None


def biases(asked: AskedChoice, served: ServedEngine) -> Mapping[int, float]:
    """Returns the bias of each token: the sum, if it is listed twice. Tokens outside of the vocabulary are left out."""
    summed: dict[int, float] = {}
    for token, bias in asked.sampling.logit_bias:
        if 0 <= token < (served.vocabulary or 2**31):
            summed[token] = summed.get(token, 0.0) + bias
    return summed


def same_length(*columns: Sequence[object]) -> None:
    """Raises EngineProtocolError unless all have one length."""
    if len({len(column) for column in columns}) > 1:
        raise EngineProtocolError(f"columns of an event differ in length: {[len(column) for column in columns]}")
