"""Reads the rotary settings of a config.json, in both spellings.

They are `rope_parameters` (transformers 5) and `rope_theta` with `rope_scaling` (before). If both
are present, `rope_scaling` is used, as in transformers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Literal

from ryzanstein.worker.architectures.spec import (
    LinearScaling,
    Llama3Scaling,
    LongScaling,
    RotaryScaling,
    RotarySpec,
    YarnScaling,
)
from ryzanstein.worker.architectures.values import MAX_COUNT, Values
from ryzanstein.worker.refusal import CheckpointError, excerpt

Rotated = Literal["whole", "kinds", "factor", "count"]
"""The part of a head that rotates.

"whole": all of it. "kinds": all of it, with settings for each kind of layer. "factor": the part
given by `partial_rotary_factor`. "count": `rotary_dim` numbers, without other settings.
"""


def rotary_table(values: Values) -> Values:
    """Returns the object with the settings of all layers."""
    return values.table("rope_scaling" if values.optional("rope_scaling") else "rope_parameters")


def rotary(values: Values, head_dim: int, rotated: Rotated, *, interleaved: bool) -> RotarySpec:
    """Returns the rotation of a decoder that has only one.

    Raises CheckpointError, which names what is missing or not known.
    """
    if rotated == "count":
        return RotarySpec(10000.0, _paired(values.count("rotary_dim"), head_dim), interleaved)
    table = rotary_table(values)
    if (kind := next((key for key in ("full_attention", "sliding_attention") if key in table.config), None)) is not None:
        raise table.error(kind, "is not supported: all layers must have the same rotation")
    table.refuse_null("rope_theta")
    theta = table.number("rope_theta", values.number("rope_theta", 10000.0))
    dim = _dim(values, table, head_dim, rotated)
    stretched = scaling(values, table)
    if isinstance(stretched, LongScaling) and len(stretched.factors) != dim // 2:
        raise table.error("short_factor", f"must have {dim // 2} numbers")
    return RotarySpec(theta, dim, interleaved, stretched)


def scaling(values: Values, table: Values) -> RotaryScaling | None:
    """Returns how `table` stretches the wavelengths, or None if it does not."""
    kind = _kind(table)
    if kind not in SCALINGS:
        raise table.error("rope_type", f"{excerpt(kind)} is not supported, only {', '.join(SCALINGS)}")
    return SCALINGS[kind](values, table)


def served_context(values: Values) -> int:
    """Returns the context length that can be served: as vLLM reads it.

    A card that stretches positions by a factor names the context before it, as that of training or,
    with YaRN, as the original one. LongRoPE has another set of factors beyond the original context.
    Keys in the cache cannot change their factors when a sequence grows past it, and the same tokens
    would have other keys in a longer prompt: the context ends where the first set of factors ends.
    """
    context = values.count("max_position_embeddings")
    table = rotary_table(values)
    match _kind(table):
        case "longrope":
            return min(context, original_context(values, table))
        case "yarn" if table.optional("factor") is not None:
            return _stretched(original_context(values, table), table)
        case "linear":
            return _stretched(context, table)
        case _:
            return context


def _stretched(context: int, table: Values) -> int:
    return min(MAX_COUNT, max(1, int(context * table.number("factor"))))


def score_growth(values: Values) -> float:
    """Returns the factor of all scores.

    As in DeepSeek, it is not 1 only if positions are scaled and `mscale_all_dim` is set.
    """
    table = rotary_table(values)
    if _kind(table) == "default" or not table.config.get("mscale_all_dim"):
        return 1.0
    return float(_magnitude(table.number("factor"), table.number("mscale_all_dim")) ** 2)


def rotary_kind(values: Values) -> str:
    """Returns transformers' name for the scaling of positions."""
    return _kind(rotary_table(values))


def _kind(table: Values) -> str:
    return str(table.config.get("rope_type", table.config.get("type", "default")))


def _dim(values: Values, table: Values, head_dim: int, rotated: Rotated) -> int:
    """Returns how many numbers of a head rotate.

    If the whole head rotates, the plain rotation ignores partial_rotary_factor; a scaled rotation
    would be too short for the head and is refused.
    """
    if rotated == "factor":
        table.refuse_null("partial_rotary_factor")
        return _paired(int(head_dim * _factor(values, table)), head_dim)
    if _kind(table) != "default" and int(head_dim * _factor(values, table)) != head_dim:
        raise CheckpointError(
            f"config.json: partial_rotary_factor is not supported with {table.name('rope_type')} {_kind(table)}"
        )
    return _paired(head_dim, head_dim)


def _factor(values: Values, table: Values) -> float:
    return table.number("partial_rotary_factor", values.number("partial_rotary_factor", 1.0))


def _paired(dim: int, head_dim: int) -> int:
    if dim % 2 or not 0 < dim <= head_dim:
        raise CheckpointError(
            f"config.json: {dim} numbers of a head cannot be rotated: must be even, above 0 and at most {head_dim}"
        )
    return dim


def original_context(values: Values, table: Values) -> int:
    """Returns the context before positions were scaled. Beside the settings of the rotation it counts first."""
    values.refuse_null("original_max_position_embeddings")
    table.refuse_null("original_max_position_embeddings")
    if values.optional("original_max_position_embeddings") is not None:
        return values.count("original_max_position_embeddings")
    return table.count("original_max_position_embeddings", values.count("max_position_embeddings"))


def _none(values: Values, table: Values) -> None:
    """Returns None: the wavelengths stay the same."""


def _dynamic(values: Values, table: Values) -> None:
    """Returns None: nothing changes before max_position_embeddings, where the context ends."""
    table.number("factor")


def _linear(values: Values, table: Values) -> LinearScaling:
    return LinearScaling(table.number("factor"))


def _llama3(values: Values, table: Values) -> Llama3Scaling:
    return Llama3Scaling(
        factor=table.number("factor"),
        low_freq_factor=table.number("low_freq_factor"),
        high_freq_factor=table.number("high_freq_factor"),
        original_context=original_context(values, table),
    )


def _yarn(values: Values, table: Values) -> YarnScaling:
    before = original_context(values, table)
    factor = table.number("factor", values.count("max_position_embeddings") / before)
    whole = table.config.get("truncate", True)
    return YarnScaling(
        factor=factor,
        attention_factor=table.number("attention_factor", _yarn_attention_factor(table, factor)),
        beta_fast=table.number("beta_fast", 32),
        beta_slow=table.number("beta_slow", 1),
        original_context=before,
        whole_dimensions=bool(whole),
    )


def _yarn_attention_factor(table: Values, factor: float) -> float:
    if table.config.get("mscale") and table.config.get("mscale_all_dim"):
        return _magnitude(factor, table.number("mscale")) / _magnitude(factor, table.number("mscale_all_dim"))
    return _magnitude(factor, 1.0)


def _magnitude(factor: float, scale: float) -> float:
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _long(values: Values, table: Values) -> LongScaling:
    before = original_context(values, table)
    factor = table.number("factor", values.count("max_position_embeddings") / before)
    usual = math.sqrt(1 + math.log(factor) / math.log(before)) if factor > 1 < before else 1.0
    return LongScaling(table.numbers("short_factor"), table.number("attention_factor", usual))


SCALINGS: Mapping[str, Callable[[Values, Values], RotaryScaling | None]] = {
    "default": _none,
    "dynamic": _dynamic,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _long,
}
