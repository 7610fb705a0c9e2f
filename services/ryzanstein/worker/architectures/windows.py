"""Which layers have a sliding window if config.json has no `layer_types`, as in transformers."""

from __future__ import annotations

from ryzanstein.worker.architectures.values import Values


def every_layer(values: Values, index: int) -> bool:
    """Returns true for all layers if config.json has a window."""
    return values.optional_count("sliding_window") is not None


def every_layer_if_used(values: Values, index: int) -> bool:
    """Returns true for all layers if `use_sliding_window` is true."""
    return values.flag("use_sliding_window") and every_layer(values, index)


def upper_layers(values: Values, index: int) -> bool:
    """Returns true for layers from `max_window_layers` on."""
    return every_layer_if_used(values, index) and index >= values.count("max_window_layers")


def even_layers_below(values: Values, index: int) -> bool:
    """Returns true for every other layer below `max_window_layers`."""
    return every_layer_if_used(values, index) and index % 2 == 0 and index < values.count("max_window_layers")


def even_layers(values: Values, index: int) -> bool:
    """Returns true for every other layer, starting with the first."""
    return every_layer(values, index) and index % 2 == 0


def all_but_each_sixth(values: Values, index: int) -> bool:
    """Returns true for all but one in `sliding_window_pattern` layers."""
    return every_layer(values, index) and (index + 1) % values.count("sliding_window_pattern", 6) != 0


def all_but_each_fourth(values: Values, index: int) -> bool:
    """Returns true for all but every fourth layer."""
    return every_layer(values, index) and (index + 1) % 4 != 0


def all_but_the_first_of_four(values: Values, index: int) -> bool:
    """Returns true for all layers but the first, the fifth and so on."""
    return every_layer(values, index) and index % 4 != 0


def all_but_one_in_a_pattern(values: Values, index: int) -> bool:
    """Returns true for all but one in `sliding_window_pattern` layers, even if there is no window to give them."""
    return (index + 1) % values.count("sliding_window_pattern", 4) != 0
