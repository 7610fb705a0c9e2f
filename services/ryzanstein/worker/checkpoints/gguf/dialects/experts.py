"""Hyper-parameters of mixtures of experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ryzanstein.worker.architectures.spec import DecoderSpec, MoeSpec
from ryzanstein.worker.checkpoints.gguf.dialects.metadata import MetadataReader
from ryzanstein.worker.checkpoints.gguf.header import Value
from ryzanstein.worker.refusal import CheckpointError

MAX_EXPERTS = 2**15
"""The most experts in all layers together; the largest known models have 23,040. Each has three matrices, listed one by one."""
_DOWN = "ffn_down_exps.weight"


@dataclass(frozen=True, slots=True)
class Experts:
    """Experts in all layers but the first few. Their width has a key of its own in config.json, or is the MLP's.

    `shared`: a shared expert has a width of its own.
    """

    width: str | None = None
    shared: bool = False

    def read(self, reader: MetadataReader, config: Mapping[str, Any]) -> dict[str, Any]:
        used = reader.count("expert_used_count")
        found: dict[str, Any] = {"num_experts": _checked_count(reader, config), "num_experts_per_tok": used}
        if self.width is not None:
            found[self.width] = reader.count("expert_feed_forward_length", max(1, config["intermediate_size"] // used))
        if self.shared:
            stored = reader.count("expert_shared_feed_forward_length", config["intermediate_size"])
            found["shared_expert_intermediate_size"] = stored
        return found

    def write(self, spec: DecoderSpec, config: Mapping[str, Any]) -> dict[str, Value]:
        moe = experts_of(spec)
        found: dict[str, Value] = {"expert_count": moe.num_experts, "expert_used_count": moe.top_k}
        if self.width is not None:
            found["expert_feed_forward_length"] = moe.width
        if self.shared and moe.shared_width is not None:
            found["expert_shared_feed_forward_length"] = moe.shared_width
        return found


def experts_of(spec: DecoderSpec) -> MoeSpec:
    """Returns the experts that a decoder's layers have. Raises CheckpointError if none has."""
    found = next((layer.experts for layer in spec.layers if layer.experts is not None), None)
    if found is None:
        raise CheckpointError("config.json: no layer has experts, which cannot be written as GGUF")
    return found


def _checked_count(reader: MetadataReader, config: Mapping[str, Any]) -> int:
    """Returns the number of experts, which is also that of the matrices in each tensor of experts."""
    count, layers = reader.count("expert_count"), config["num_hidden_layers"]
    if count * layers > MAX_EXPERTS:
        reader.refuse("expert_count", f"is {count} in {layers} layers; all layers together must have at most {MAX_EXPERTS}")
    for name, shape in reader.facts.shapes.items():
        if name.endswith(_DOWN) and (len(shape) != 3 or shape[0] != count):
            raise CheckpointError(f"{reader.facts.file}: tensor {name} has shape {list(shape)}, must be of {count} experts")
    return count
