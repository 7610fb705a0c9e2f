"""Typed access to an untyped config.json. A key that is missing or of another kind is refused by the name that it has there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ryzanstein.worker.model.refusal import CheckpointError


@dataclass(frozen=True, slots=True)
class Values:
    """A mapping of config.json; `where` leads to it from the top. Null counts as absent, except where null has a meaning.

    Callers use Llama's names; `renamed` has what the architecture calls them, where Llama's are understood as well, `defaults`
    what an absent key means.
    """

    config: Mapping[str, Any]
    where: str = ""
    renamed: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def name(self, key: str) -> str:
        """The key as the file has it, with its place."""
        return self.where + self._key(key)

    def _key(self, key: str) -> str:
        own = self.renamed.get(key, key)
        return key if self.config.get(own) is None and self.config.get(key) is not None else own

    def count(self, key: str, default: int | None = None, least: int = 1) -> int:
        value = self._get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            bound = "above 0" if least == 1 else f"of at least {least}"
            raise CheckpointError(f"config.json: {self.name(key)} must be a whole number {bound}, got {value!r}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
            raise CheckpointError(f"config.json: {self.name(key)} must be a number above 0, got {value!r}")
        return float(value)

    def flag(self, key: str) -> bool:
        value = self._get(key, False)
        if not isinstance(value, bool):
            raise CheckpointError(f"config.json: {self.name(key)} must be true or false, got {value!r}")
        return value

    def table(self, key: str) -> Values:
        value = self._get(key, {})
        if not isinstance(value, dict):
            raise CheckpointError(f"config.json: {self.name(key)} must be an object, got {value!r}")
        return Values(value, f"{self.name(key)}.")

    def numbers(self, key: str) -> tuple[float, ...]:
        value = self._get(key, None)
        if not isinstance(value, list) or not all(isinstance(number, int | float) for number in value):
            raise CheckpointError(f"config.json: {self.name(key)} must be a list of numbers, got {value!r}")
        return tuple(map(float, value))

    def indices(self, key: str) -> tuple[int, ...]:
        value = self._get(key, [])
        if not isinstance(value, list) or not all(isinstance(index, int) for index in value):
            raise CheckpointError(f"config.json: {self.name(key)} must be a list of whole numbers, got {value!r}")
        return tuple(value)

    def per_layer(self, key: str, num_layers: int) -> list[Any] | None:
        """A list with an entry for each layer, or None where there is none."""
        value = self.optional(key)
        if value is not None and (not isinstance(value, list) or len(value) < num_layers):
            raise CheckpointError(f"config.json: {self.name(key)} must be a list of {num_layers} entries, got {value!r}")
        return value

    def optional(self, key: str) -> Any:
        """The value, where null means that there is none; absent is the default."""
        return self.config.get(self._key(key), self.defaults.get(key))

    def optional_count(self, key: str) -> int | None:
        return None if self.optional(key) is None else self.count(key)

    def optional_number(self, key: str) -> float | None:
        return None if self.optional(key) is None else self.number(key)

    def _get(self, key: str, default: Any) -> Any:
        value = self.config.get(self._key(key))
        value = self.defaults.get(key) if value is None else value
        value = default if value is None else value
        if value is None:
            raise CheckpointError(f"config.json: {self.name(key)} is missing")
        return value
