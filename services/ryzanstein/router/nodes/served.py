"""A model that the cluster serves, as shown to clients."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that at least one ready node serves; `context_length` in tokens."""

    name: str
    context_length: int
    ready_nodes: int
