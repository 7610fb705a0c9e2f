"""What is asked of a model that turns texts into vectors, and what it answers."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from ryzanstein import errors
from ryzanstein.errors import RyzansteinError
from ryzanstein.generation.prompts import TextPrompt, TokenPrompt
from ryzanstein.generation.request import CACHE_SCOPES, valid_priority

MAX_INPUTS = 2048
MAX_NUMBERS = 4_194_304
"""Of one request: inputs times numbers of a vector. As JSON they take about 85 MB."""

EmbedInput = TextPrompt | TokenPrompt


@dataclass(frozen=True, slots=True)
class EmbeddingRequest:
    """Inputs of which vectors are wanted.

    `dimensions` None: whole vectors. `prompt_name` is one of the model's; empty: its default.
    `deadline` is Unix seconds. `cache_scope` is that of `GenerationRequest`: a vector of the last token
    alone is made from cached prefixes.
    """

    model: str
    inputs: tuple[EmbedInput, ...]
    dimensions: int | None = None
    prompt_name: str = ""
    priority: int = 0
    tenant: str = ""
    cache_scope: str = ""
    deadline: float | None = None
    request_id: str = ""

    @property
    def features(self) -> frozenset[str]:
        """The features that a node needs, as of `GenerationRequest`."""
        return frozenset({CACHE_SCOPES} if self.cache_scope else ())

    def validate(self) -> None:
        """Raises INVALID_ARGUMENT that names the field and its bound."""
        if not 1 <= len(self.inputs) <= MAX_INPUTS:
            raise errors.invalid("inputs", f"must have between 1 and {MAX_INPUTS} entries", len(self.inputs))
        if self.dimensions is not None and self.dimensions < 1:
            raise errors.invalid("dimensions", "must be at least 1", self.dimensions)
        if self.dimensions is not None:
            check_numbers(len(self.inputs), self.dimensions)
        valid_priority(self.priority)


@dataclass(frozen=True, slots=True)
class Embedded:
    """The vector of one input, as numbers in single precision; `prompt_tokens` of that input."""

    values: array[float]
    prompt_tokens: int


def no_embeddings(model: str) -> RyzansteinError:
    """Returns the refusal of a model that generates text."""
    named = f"model {model!r}" if model else "the model"
    return errors.failed_precondition("NO_EMBEDDINGS", f"{named} generates text; it is not made for embeddings")


def check_numbers(num_inputs: int, dimensions: int) -> None:
    """Raises INVALID_ARGUMENT if an answer would be too large."""
    if num_inputs * dimensions > MAX_NUMBERS:
        bound = f"inputs times numbers of a vector ({dimensions}) must be at most {MAX_NUMBERS}"
        raise errors.invalid("inputs", bound, num_inputs)
