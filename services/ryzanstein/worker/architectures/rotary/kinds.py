"""Two rotations in one decoder: one for layers with a window, and one for those without."""

from __future__ import annotations

from dataclasses import replace

from ryzanstein.worker.architectures.rotary.config import scaling
from ryzanstein.worker.architectures.spec import DecoderSpec, LongScaling, RotarySpec
from ryzanstein.worker.architectures.values import Values


def with_rotary_kinds(spec: DecoderSpec, values: Values, *, whole_theta: float, local_theta: float) -> DecoderSpec:
    """Returns the decoder with the rotations that config.json gives to both kinds of layers.

    `whole_theta` and `local_theta` are the bases of layers without and with a window where
    `rope_parameters` has none.
    """
    whole, local = _tables(values)
    rotaries = _rotary(values, whole, spec, whole_theta), _rotary(values, local, spec, local_theta)
    layers = tuple(replace(layer, rotary=0 if layer.window is None else 1) for layer in spec.layers)
    return replace(spec, rotaries=rotaries, layers=layers)


def _tables(values: Values) -> tuple[Values, Values]:
    """Returns the settings of layers without a window, and of layers with one.

    `rope_scaling` applies to the former. Settings that are not given per kind of layer are ignored,
    as in transformers.
    """
    tables = values.table("rope_parameters")
    whole, local = tables.table("full_attention"), tables.table("sliding_attention")
    stretched = values.table("rope_scaling")
    if stretched.config:
        whole = Values({"rope_type": "default", **whole.config, **stretched.config}, stretched.where)
    return whole, local


def _rotary(values: Values, table: Values, spec: DecoderSpec, theta: float) -> RotarySpec:
    table.refuse_null("rope_theta")
    stretched = scaling(values, table)
    if isinstance(stretched, LongScaling):
        raise table.error("rope_type", "'longrope' is not supported for this architecture")
    return RotarySpec(table.number("rope_theta", theta), spec.head_dim, scaling=stretched)
