"""What a decoder is: the choices in which architectures differ. Layers are built from it; it knows no file and no rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Activation = Literal["silu", "gelu", "gelu_tanh"]


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Positions divided by `factor` (Chen et al. 2023)."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3.1's: long wavelengths divided by `factor`, short ones kept, a ramp between the two."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int


@dataclass(frozen=True, slots=True)
class RotarySpec:
    """Rotary position embedding (Su et al. 2021) over the whole head, halves rotated."""

    theta: float
    scaling: LinearScaling | Llama3Scaling | None = None


@dataclass(frozen=True, slots=True)
class WeightNames:
    """What a checkpoint calls its tensors, without `.weight` and `.bias`; those of a layer follow `layer`, which has `{layer}`.

    Tensors that end in one of `ignored` may be there and are not read.
    """

    embedding: str
    final_norm: str
    head: str
    layer: str
    attention_norm: str
    query: str
    key: str
    value: str
    attention_out: str
    mlp_norm: str
    gate: str
    up: str
    down: str
    ignored: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """One decoder, complete: every number and choice that its layers need."""

    model_type: str
    names: WeightNames
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    context_length: int
    norm_eps: float
    rotary: RotarySpec
    activation: Activation
    attention_bias: bool
    mlp_bias: bool
    tied_head: bool
