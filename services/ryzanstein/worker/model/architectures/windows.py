"""Which layers have a sliding window where config.json has no `layer_types`, as transformers decides it."""

from __future__ import annotations

from ryzanstein.worker.model.architectures.values import Values


def every_layer(values: Values, index: int) -> bool:
    """All, where config.json has a window."""
    return values.optional_count("sliding_window") is not None


def every_layer_if_used(values: Values, index: int) -> bool:
    """All, where `use_sliding_window` says so."""
    return values.flag("use_sliding_window") and every_layer(values, index)


def upper_layers(values: Values, index: int) -> bool:
    """Those from `max_window_layers` on."""
    return every_layer_if_used(values, index) and index >= values.count("max_window_layers")


def even_layers_below(values: Values, index: int) -> bool:
    """Every other one, below `max_window_layers`."""
    return every_layer_if_used(values, index) and index % 2 == 0 and index < values.count("max_window_layers")


def even_layers(values: Values, index: int) -> bool:
    """Every other one, from the first on."""
    return every_layer(values, index) and index % 2 == 0


def all_but_each_sixth(values: Values, index: int) -> bool:
    """All but one in `sliding_window_pattern` layers."""
    return every_layer(values, index) and (index + 1) % values.count("sliding_window_pattern", 6) != 0
