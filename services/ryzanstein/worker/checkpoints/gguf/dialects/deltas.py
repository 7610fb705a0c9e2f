"""Hyper-parameters of gated delta rules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ryzanstein.worker.architectures.mixers import DeltaSpec
from ryzanstein.worker.architectures.spec import DecoderSpec
from ryzanstein.worker.checkpoints.gguf.dialects.metadata import MetadataReader
from ryzanstein.worker.checkpoints.gguf.header import Value
from ryzanstein.worker.refusal import CheckpointError

_INTERVAL, _USUAL_INTERVAL = "full_attention_interval", 4
_SECTIONS = np.array([11, 11, 10, 0], np.int32)
"""How many pairs of a rotated head turn with time, height and width. In text all three are the position."""


@dataclass(frozen=True, slots=True)
class DeltaRule:
    """A delta rule in all layers but one in so many. `sections`: llama.cpp demands those of multimodal positions."""

    sections: bool = True

    def read(self, reader: MetadataReader, config: Mapping[str, Any]) -> dict[str, Any]:
        interval = reader.count(_INTERVAL, _USUAL_INTERVAL)
        num_layers, num_values = config["num_hidden_layers"], reader.count("ssm.time_step_rank")
        inner = reader.count("ssm.inner_size")
        if inner % num_values:
            reader.refuse("ssm.inner_size", f"is {inner}, which does not divide over {num_values} heads")
        return {
            "layer_types": ["linear_attention" if (layer + 1) % interval else "full_attention" for layer in range(num_layers)],
            "linear_conv_kernel_dim": reader.count("ssm.conv_kernel"),
            "linear_key_head_dim": reader.count("ssm.state_size"),
            "linear_value_head_dim": inner // num_values,
            "linear_num_key_heads": reader.count("ssm.group_count"),
            "linear_num_value_heads": num_values,
        }

    def write(self, spec: DecoderSpec, config: Mapping[str, Any]) -> dict[str, Value]:
        delta = _only(spec)
        if delta.value_dim != delta.key_dim:
            both = f"{delta.value_dim} is not linear_key_head_dim {delta.key_dim}"
            raise CheckpointError(f"config.json: linear_value_head_dim {both}, which cannot be written as GGUF")
        attention = next(index for index, layer in enumerate(spec.layers) if layer.state is None)
        return {
            _INTERVAL: attention + 1,
            "ssm.conv_kernel": delta.length,
            "ssm.state_size": delta.key_dim,
            "ssm.group_count": delta.num_key_heads,
            "ssm.time_step_rank": delta.num_value_heads,
            "ssm.inner_size": delta.num_value_heads * delta.value_dim,
            **({"rope.dimension_sections": _SECTIONS} if self.sections else {}),
        }


def _only(spec: DecoderSpec) -> DeltaSpec:
    found = next((state for state in spec.states if isinstance(state, DeltaSpec)), None)
    if found is None:
        raise CheckpointError("config.json: layer_types without linear_attention cannot be written as GGUF")
    return found
