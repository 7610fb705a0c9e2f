"""The description of a decoder: the choices in which architectures differ.

Layers are built from it. It does not depend on files or ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from ryzanstein.worker.architectures.layer_heads import BesideNames, HeadsSpec, PerLayerNames, PerLayerSpec
from ryzanstein.worker.architectures.mixers import (
    Activation,
    ConvolutionSpec,
    DeltaNames,
    MambaNames,
    StateSpec,
)
from ryzanstein.worker.settings.sparse import SparseRule

QkvLayout = Literal["split", "stacked", "grouped"]


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Scaling that divides positions by `factor` (Chen et al. 2023)."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3.1's scaling: long wavelengths divided by `factor`, short ones kept, with a ramp."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN (Peng et al. 2023): like Llama 3.1's scaling, with the ramp over dimensions.

    Scores grow by `attention_factor` squared.
    """

    factor: float
    attention_factor: float
    beta_fast: float
    beta_slow: float
    original_context: int
    whole_dimensions: bool


@dataclass(frozen=True, slots=True)
class LongScaling:
    """LongRoPE (Ding et al. 2024) up to the original context: a factor for each wavelength."""

    factors: tuple[float, ...]
    attention_factor: float


@dataclass(frozen=True, slots=True)
class PartScaling:
    """No rotation of a head's pairs from `num_pairs` on (Gemma 4); the wavelengths of the others are times `factor`."""

    num_pairs: int
    factor: float


RotaryScaling = LinearScaling | Llama3Scaling | YarnScaling | LongScaling | PartScaling


@dataclass(frozen=True, slots=True)
class QueryGrowth:
    """Queries that grow with their position: by 1 + `rate` ln(1 + the whole number of `interval` tokens before it).

    The models of Mistral's third generation have it, after Llama 4.
    """

    rate: float
    interval: int


@dataclass(frozen=True, slots=True)
class RotarySpec:
    """Rotary position embedding (Su et al. 2021) of the first `dim` numbers of a head.

    A pair is number i of each half, or two neighbours if `interleaved`.
    """

    theta: float
    dim: int
    interleaved: bool = False
    scaling: RotaryScaling | None = None
    growth: QueryGrowth | None = None


@dataclass(frozen=True, slots=True)
class AlibiSpec:
    """Attention with linear biases (Press et al. 2022): scores get slope x position x `scale`.

    `rounded` is for Falcon: slopes and biases are bfloat16, whatever the model's dtype.
    """

    scale: float = 1.0
    rounded: bool = False


@dataclass(frozen=True, slots=True)
class NormSpec:
    """RMS norm (Zhang and Sennrich 2019) or layer norm (Ba et al. 2016).

    `plus_one`: the scale is the stored weight plus one.
    """

    kind: Literal["rms", "layer"]
    eps: float
    weight: bool = True
    bias: bool = False
    plus_one: bool = False


@dataclass(frozen=True, slots=True)
class QkNormSpec:
    """A norm of queries and keys before they are rotated, or after that if `after_rotation`.

    It is over each head with one weight for all heads ("shared") or one weight for each head,
    stored as one tensor ("heads") or one tensor per head ("head_list"); or over all heads together
    ("width"). `values`: each head's values are normed too, without a weight.
    """

    norm: NormSpec
    scope: Literal["shared", "heads", "head_list", "width"]
    after_rotation: bool = False
    values: bool = False


@dataclass(frozen=True, slots=True)
class LatentSpec:
    """Multi-head latent attention (DeepSeek-V2, 2024).

    A token's keys and values, of all heads, are products of one latent. A head's query or key has
    `plain_dim` plain numbers and `rotary_dim` rotated ones; the rotated numbers of a key are shared
    by all heads. A value has `value_dim` numbers. If `query_rank` is not None, queries come from a
    latent of so many numbers. `norm` is the norm of the latents.
    """

    rank: int
    query_rank: int | None
    plain_dim: int
    rotary_dim: int
    value_dim: int
    norm: NormSpec


@dataclass(frozen=True, slots=True)
class GroupLimit:
    """A division of experts into `num_groups` groups that limits each token's choice.

    A token's experts are in the `top_k` groups whose best `num_rated` experts have the highest
    sums.
    """

    num_groups: int
    top_k: int
    num_rated: int


@dataclass(frozen=True, slots=True)
class RoutingSpec:
    """A rule that turns a router's products into the weights of the chosen experts.

    A weight is the expert's score times `scale`. Scores are a softmax over all experts, or a
    sigmoid of each. If `normalized`, the scores of the chosen experts add up to 1 before they are
    scaled; they are divided by their sum plus `added`, or by `least` if the sum is less. If
    `corrected`, a bias is added for the choice but not for the weights (DeepSeek-V3, 2024);
    `correction_row`: it is stored as a row, [1, experts].
    """

    scores: Literal["softmax", "sigmoid"] = "softmax"
    normalized: bool = False
    added: float = 1e-20
    least: float = 0.0
    scale: float = 1.0
    corrected: bool = False
    correction_row: bool = False
    groups: GroupLimit | None = None


@dataclass(frozen=True, slots=True)
class ClippedGate:
    """A gate of gpt-oss: gate * sigmoid(`gain` * gate) * (up + 1).

    Gates are at most `limit`, ups are from -`limit` to `limit`.
    """

    limit: float
    gain: float


@dataclass(frozen=True, slots=True)
class MoeSpec:
    """A mixture of experts: each token uses `top_k` experts of `width` columns.

    A shared expert of `shared_width` columns sees every token. It has a gate of its own if the
    names include one. If `biased`, the router and the experts' products have biases; the router's
    count in the weights, too. `gate` replaces the decoder's activation.
    """

    num_experts: int
    top_k: int
    width: int
    routing: RoutingSpec
    shared_width: int | None = None
    biased: bool = False
    gate: ClippedGate | None = None


@dataclass(frozen=True, slots=True)
class Factors:
    """Constants of Falcon H1: of the input and output of attention beside a state space, of gates before their activation, and
    of the MLP's output."""

    attention_in: float = 1.0
    attention_out: float = 1.0
    gate: float = 1.0
    mlp_out: float = 1.0


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """The choices that may differ between layers.

    A token sees itself and the `window` - 1 tokens before it. `rotary` is an index into the
    decoder's `rotaries`. `sparse` is what the node makes it read, if it was not trained so. With
    `convolution` there is no attention. A layer that keeps a `state` may have attention beside it. A layer
    may lack the MLP, or have nothing else. `heads` and `mlp_width` are its own, where they are not the decoder's.
    """

    window: int | None = None
    rotary: int | None = None
    experts: MoeSpec | None = None
    attention_scale: float = 1.0
    sparse: SparseRule | None = None
    convolution: ConvolutionSpec | None = None
    state: StateSpec | None = None
    attention: bool = True
    mlp: bool = True
    heads: HeadsSpec | None = None
    mlp_width: int | None = None

    @property
    def has_planes(self) -> bool:
        """Whether it takes planes of blocks: for keys and values, or for the inputs of a short convolution."""
        return (self.attention and self.keys_of is None) or self.convolution is not None

    @property
    def planes(self) -> int:
        """How many planes of a block it takes, or those that it reads of another layer."""
        if self.heads is not None:
            return self.heads.planes
        return 1 if self.convolution is None else self.convolution.planes

    @property
    def keys_of(self) -> int | None:
        """The layer whose keys and values it reads, if it has none of its own."""
        return None if self.heads is None else self.heads.shared_with


@dataclass(frozen=True, slots=True)
class WeightNames:
    """The names of a checkpoint's tensors, without `.weight` and `.bias`.

    `activation` has the numbers of one that is learned. `sinks` is a number for each query head: a score
    that its softmax counts and that has no value (gpt-oss, after Xiao et al. 2023). `layer_scale` is a number
    that multiplies what a layer puts out. With `beside` a layer has an MLP and experts, which are added.

    Names within a layer follow `layer`, which contains `{layer}`. A part that an architecture lacks
    is None. Projections that a checkpoint stores in one tensor have the same name. `expert` and
    `shared_expert` precede `gate`, `up` and `down` of an expert; those of the shared one may have
    other names, `shared_projections`. A gate without a name does not exist. Tensors whose names end in one of
    `ignored`, where * is anything, may exist and are not read. If no tensor begins with `prefix`, the names are without it.
    """

    embedding: str
    final_norm: str
    head: str
    layer: str
    attention_norm: str | None
    query: str
    key: str
    value: str
    attention_out: str
    mlp_norm: str | None
    gate: str | None
    up: str
    down: str
    activation: str = ""
    embedding_norm: str | None = None
    position: str | None = None
    query_norm: str | None = None
    key_norm: str | None = None
    sinks: str | None = None
    attention_post_norm: str | None = None
    mlp_post_norm: str | None = None
    convolution_in: str = ""
    convolution: str = ""
    convolution_out: str = ""
    layer_scale: str | None = None
    per_layer: PerLayerNames | None = None
    beside: BesideNames | None = None
    delta: DeltaNames | None = None
    mamba: MambaNames | None = None
    latent: str = ""
    latent_norm: str = ""
    query_latent: str = ""
    query_latent_norm: str = ""
    router: str | None = None
    router_correction: str = ""
    expert: str = ""
    expert_projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    shared_expert: str = ""
    shared_projections: tuple[str, str, str] | None = None
    shared_gate: str | None = None
    prefix: str = ""
    ignored: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """The complete description of a decoder: every number and choice that its layers need.

    `transposed`: linear weights of the layers are stored as [inputs, outputs]. `parallel`:
    attention and MLP of a layer read the same input and are added together. `position_offset` is
    the row of position 0 in the table of learned positions. With `latent`,
    `num_kv_heads` and `head_dim` are the cache's: one key that all queries share, as wide as the
    latent plus the rotated numbers. With `gated_attention` each head's query is stored with a gate of its
    output, of as many numbers.
    """

    model_type: str
    names: WeightNames
    layers: tuple[LayerSpec, ...]
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    context_length: int
    norm: NormSpec
    activation: Activation
    rotaries: tuple[RotarySpec, ...]
    alibi: AlibiSpec | None
    position_offset: int
    qk_norm: QkNormSpec | None
    qkv_layout: QkvLayout
    transposed: bool
    parallel: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    head_bias: bool
    tied_head: bool
    qkv_clip: float | None = None
    clip_after_norm: bool = False
    score_cap: float | None = None
    logit_cap: float | None = None
    logit_scale: float = 1.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    latent: LatentSpec | None = None
    gated_attention: bool = False
    factors: Factors = Factors()
    per_layer: PerLayerSpec | None = None

    def of_layer(self, index: int) -> DecoderSpec:
        """Returns the decoder with the numbers that layer `index` has of its own."""
        layer = self.layers[index]
        if layer.heads is None and layer.mlp_width is None:
            return self
        heads = layer.heads or HeadsSpec(self.num_kv_heads, self.head_dim)
        names = replace(self.names, value=self.names.key) if heads.values_are_keys else self.names
        width = layer.mlp_width or self.intermediate_size
        return replace(self, names=names, num_kv_heads=heads.num_kv_heads, head_dim=heads.head_dim, intermediate_size=width)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def has_plain_scores(self) -> bool:
        """Whether torch's fused attention has all that changes the scores."""
        return self.score_cap is None and self.names.sinks is None

    @property
    def has_own_heads(self) -> bool:
        """Whether layers differ in their heads, so that a page has no shape of heads."""
        return any(layer.heads is not None for layer in self.layers)

    @property
    def has_convolutions(self) -> bool:
        """Whether a layer has a short convolution, whose channels key-value heads share out."""
        return any(layer.convolution is not None for layer in self.layers)

    @property
    def heads_apart(self) -> str:
        """Why no two ranks may hold the same key-value head; empty if they may."""
        return "with short convolutions" if self.has_convolutions else ""

    @property
    def states(self) -> tuple[StateSpec, ...]:
        """What those of its layers are that keep a state."""
        return tuple(layer.state for layer in self.layers if layer.state is not None)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The distinct windows of the layers."""
        return tuple({layer.window: None for layer in self.layers})
