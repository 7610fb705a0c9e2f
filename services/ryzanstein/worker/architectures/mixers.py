"""What may stand in the place of attention, or beside it: short convolutions, and rules that keep a state of a sequence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Activation = Literal["silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "relu2", "xielu"]


@dataclass(frozen=True, slots=True)
class ConvolutionSpec:
    """A gated short convolution in the place of attention (LFM2, Liquid AI 2025).

    Each channel of the width is a sum over the token itself and the `length` - 1 tokens before it. In the
    cache a token takes as many planes of a block as its channels need beside keys and values.
    """

    length: int
    planes: int
    bias: bool = False


@dataclass(frozen=True, slots=True)
class DeltaSpec:
    """A gated delta rule in the place of attention (Yang et al. 2025, "Gated Delta Networks"), with a short convolution.

    Instead of keys and values a head keeps a matrix of `key_dim` rows and `value_dim` columns. Each
    key head serves equally many value heads, which follow each other, or if `tiled` are as many
    heads apart as there are key heads. Before the rule, queries, keys and values are sums over
    the token itself and the `length` - 1 tokens before it.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    length: int
    tiled: bool = False

    @property
    def channels(self) -> int:
        """How many numbers of a token the convolution sees."""
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim


@dataclass(frozen=True, slots=True)
class MambaSpec:
    """A state space of Mamba 2 (Dao and Gu 2024) in the place of attention, or beside it, with a short convolution.

    A head keeps a matrix of `state_dim` rows and `head_dim` columns. Each group of heads writes and reads it
    with the same two rows of `state_dim` numbers. These and the heads' inputs are first sums over the token
    itself and the `length` - 1 tokens before it, with the `activation`. Steps are from the first to the second
    of `step_limits`. Outputs are gated; `norm` says whether a norm of each group comes before or after that.
    Inputs are multiplied by `in_scale`, the projections to gates, inputs, rows of writing and of reading, and
    steps by `part_scales`, and the result by `out_scale` (Falcon H1).
    """

    num_heads: int
    num_groups: int
    head_dim: int
    state_dim: int
    length: int
    activation: Activation = "silu"
    convolution_bias: bool = True
    in_bias: bool = False
    out_bias: bool = False
    step_limits: tuple[float, float] = (0.0, float("inf"))
    norm: Literal["gated", "before_gate"] | None = "gated"
    in_scale: float = 1.0
    part_scales: tuple[float, float, float, float, float] = (1.0, 1.0, 1.0, 1.0, 1.0)
    out_scale: float = 1.0

    @property
    def width(self) -> int:
        """How many numbers its heads put out."""
        return self.num_heads * self.head_dim

    @property
    def channels(self) -> int:
        """How many numbers of a token the convolution sees."""
        return self.width + 2 * self.num_groups * self.state_dim


StateSpec = DeltaSpec | MambaSpec


@dataclass(frozen=True, slots=True)
class DeltaNames:
    """The names of a gated delta rule's tensors within a layer.

    `qkv` are queries, keys and values, `z` the output's gate, `b` the strength of writing, `a` the
    decay; `decay` and `step` are each head's own numbers for it. Projections that have the same name
    are stored by key head: of each all of its queries, keys, values and gates, or strengths and decays.
    """

    qkv: str
    z: str
    b: str
    a: str
    convolution: str
    decay: str
    step: str
    norm: str
    out: str


@dataclass(frozen=True, slots=True)
class MambaNames:
    """The names of the tensors of Mamba 2 within a layer.

    `projection` has the rows of gates, inputs, writing, reading and steps. `decay`, `step` and `skip` are each
    head's own numbers: of its decay, added to its steps, and of its input in its output.
    """

    projection: str
    convolution: str
    decay: str
    step: str
    skip: str
    norm: str
    out: str
