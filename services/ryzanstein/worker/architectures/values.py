"""Typed access to an untyped config.json.

A key that is missing or has the wrong type is refused under the name that the file uses.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ryzanstein.worker.refusal import CheckpointError, excerpt

MAX_COUNT = 2**31 - 1
"""The bound of any whole number: counts on the wire have it, and no model has more of anything."""

MAX_LAYERS = 4096
"""More layers than any model has. Layer specs are built before any tensor is looked up."""

ALIASED = frozenset(
    {
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "max_position_embeddings",
        "num_experts",
        "num_mtp_layers",
    }
)
"""Llama's keys that transformers also accepts if an architecture has another name for them."""


@dataclass(frozen=True, slots=True)
class Values:
    """A mapping of config.json; `where` is the path to it from the top.

    Null counts as absent, except for keys where null has a meaning. Callers use Llama's names.
    `renamed` has the architecture's names for them, `defaults` the values of absent keys, and
    `fixed` the values that apply whatever the file has.
    """

    config: Mapping[str, Any]
    where: str = ""
    renamed: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)

    def name(self, key: str) -> str:
        """Returns the key as in the file, with its path."""
        return self.where + self._key(key)

    def _key(self, key: str) -> str:
        own = self.renamed.get(key, key)
        known_by_alias = key in ALIASED and self.config.get(own) is None and self.config.get(key) is not None
        return key if known_by_alias else own

    def refuse_contradictions(self) -> None:
        """Raises CheckpointError if a key is present under two names with different values.

        Which of them transformers uses depends on their order.
        """
        for key in ALIASED & self.renamed.keys():
            own = self.renamed[key]
            one, other = self.config.get(own), self.config.get(key)
            if one is not None and other is not None and one != other:
                raise self.error(own, f"is {excerpt(one)} but {key} is {excerpt(other)}: they must be equal")

    def count(self, key: str, default: int | None = None, least: int = 1, most: int = MAX_COUNT) -> int:
        value = self._get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            bound = "above 0" if least == 1 else f"of at least {least}"
            raise self.error(key, f"must be a whole number {bound}, got {excerpt(value)}")
        if value > most:
            raise self.error(key, f"must be at most {most}, got {excerpt(value)}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._get(key, default)
        if not _is_number(value) or not value > 0:
            raise self.error(key, f"must be a number above 0, got {excerpt(value)}")
        return float(value)

    def flag(self, key: str) -> bool:
        """Returns a boolean.

        Null is not true, even if the default is: if transformers accepts null at all, it means
        false.
        """
        value = None if self.optional(key) is None and self.defaults.get(key) else self._get(key, False)
        if not isinstance(value, bool):
            raise self.error(key, f"must be true or false, got {excerpt(value)}")
        return value

    def table(self, key: str) -> Values:
        value = self._get(key, {})
        if not isinstance(value, dict):
            raise self.error(key, f"must be an object, got {excerpt(value)}")
        return Values(value, f"{self.name(key)}.")

    def numbers(self, key: str) -> tuple[float, ...]:
        value = self._get(key, None)
        if not isinstance(value, list) or not all(map(_is_number, value)):
            raise self.error(key, f"must be a list of numbers, got {excerpt(value)}")
        return tuple(map(float, value))

    def indices(self, key: str) -> tuple[int, ...]:
        value = self._get(key, [])
        if not isinstance(value, list) or not all(isinstance(index, int) for index in value):
            raise self.error(key, f"must be a list of whole numbers, got {excerpt(value)}")
        return tuple(value)

    def per_layer(self, key: str, num_layers: int) -> list[Any] | None:
        """Returns a list with an entry for each layer, or None if the key is absent."""
        value = self.optional(key)
        if value is not None and (not isinstance(value, list) or len(value) < num_layers):
            raise self.error(key, f"must be a list of {num_layers} entries, got {excerpt(value)}")
        return value

    def optional(self, key: str) -> Any:
        """Returns the value; null means that there is none, and an absent key has its default."""
        if key in self.fixed:
            return self.fixed[key]
        return self.config.get(self._key(key), self.defaults.get(key))

    def optional_count(self, key: str) -> int | None:
        return None if self.optional(key) is None else self.count(key)

    def optional_number(self, key: str) -> float | None:
        return None if self.optional(key) is None else self.number(key)

    def refuse_null(self, key: str) -> None:
        """Raises CheckpointError for null in a key that may be absent.

        transformers then uses no value instead of the default.
        """
        if self.config.get(self._key(key), ...) is None:
            raise self.error(key, "is null")

    def error(self, key: str, what: str) -> CheckpointError:
        """Returns an error about a key, under the name that the file uses."""
        return CheckpointError(f"config.json: {self.name(key)} {what}")

    def _get(self, key: str, default: Any) -> Any:
        value = self.optional(key)
        value = self.defaults.get(key) if value is None else value
        value = default if value is None else value
        if value is None:
            raise self.error(key, "is missing")
        return value


def _is_number(value: object) -> bool:
    """Returns whether the value is a finite number that a float can hold."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return abs(value) < 2**1023 and not math.isnan(value)
