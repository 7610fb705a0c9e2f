"""A model that the cluster serves, as shown to clients."""

from __future__ import annotations

from dataclasses import dataclass

from ryzanstein.generation.sampling_defaults import NO_DEFAULTS, SamplingDefaults


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that at least one ready node serves; `context_length` in tokens.

    `sampling_defaults` are its own values of parameters.
    """

    name: str
    context_length: int
    ready_nodes: int
    sampling_defaults: SamplingDefaults = NO_DEFAULTS
