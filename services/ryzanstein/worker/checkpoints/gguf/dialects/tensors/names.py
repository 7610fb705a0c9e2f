"""llama.cpp's names for the parts of a decoder, by ours."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ryzanstein.worker.architectures.mixers import DeltaNames, DeltaSpec, MambaNames
from ryzanstein.worker.architectures.spec import DecoderSpec, WeightNames
from ryzanstein.worker.checkpoints.gguf.dialects.dialect import Dialect
from ryzanstein.worker.checkpoints.gguf.dialects.rows.hybrids import FALCON_H1
from ryzanstein.worker.checkpoints.gguf.dialects.rows.plain import FALCON

ROPE_FACTORS = "rope_freqs.weight"
"""The factors of Llama 3's wavelengths; they belong to no tensor of a checkpoint."""
CORRECTION = "exp_probs_b.bias"
QUERY, KEY, VALUE, FUSED = "attn_q", "attn_k", "attn_v", "attn_qkv"
LATENT = "attn_kv_b"
DELTA_GATE = "attn_gate"
GATES, UPS, GATE_UPS = "ffn_gate_exps", "ffn_up_exps", "ffn_gate_up_exps"
_NORMS = ("_norm.weight", "_norm_2.weight")
DECAY, SKIP, STATE_NORM = "ssm_a", "ssm_d", "ssm_norm"
_IN_FULL = (
    *("ssm_conv1d.weight", "ssm_alpha.weight", "ssm_beta.weight", "ssm_ba.weight", DECAY, SKIP),
    *("position_embd.weight", "ffn_gate_inp.weight", "ffn_gate_inp_shexp.weight", "exps.bias", *_NORMS),
)


@dataclass(frozen=True, slots=True)
class TensorRole:
    """A part of a decoder in the file: `name`, in `layer` if it belongs to one.

    It is one of `count` that are stacked in one tensor, at `index`.
    """

    name: str
    layer: int | None = None
    index: int = 0
    count: int | None = None

    def tensor(self, name: str, kind: str) -> str:
        """Returns the name of a tensor of the same layer."""
        return f"{name}{kind}" if self.layer is None else f"blk.{self.layer}.{name}{kind}"


def is_stored_in_full(tensor: str, shape: tuple[int, ...]) -> bool:
    """Returns whether llama.cpp stores a tensor as float32 whatever the type of the file is."""
    return len(shape) == 1 or tensor.endswith(_IN_FULL)


def roles(spec: DecoderSpec, dialect: Dialect) -> Mapping[str, TensorRole]:
    """Returns the role of each tensor of a checkpoint, by its name without `.weight` and `.bias`."""
    names = spec.names
    found = {
        names.embedding: TensorRole("token_embd"),
        names.final_norm: TensorRole(dialect.final_norm),
        names.head: TensorRole("output"),
    }
    if names.embedding_norm is not None:
        found[names.embedding_norm] = TensorRole("token_embd_norm")
    if names.per_layer is not None:
        found[names.per_layer.table] = TensorRole("per_layer_token_embd")
        found[names.per_layer.projection] = TensorRole("per_layer_model_proj")
        found[names.per_layer.projection_norm] = TensorRole("per_layer_proj_norm")
    if names.position is not None:
        found[names.position] = TensorRole("position_embd")
    for layer in range(spec.num_layers):
        prefix = names.layer.format(layer=layer)
        for base, role in _of_layer(spec, dialect, layer):
            found[prefix + base] = role
    return found


def _of_layer(spec: DecoderSpec, dialect: Dialect, layer: int) -> Iterator[tuple[str, TensorRole]]:
    names, experts = spec.names, spec.layers[layer].experts
    mixing = (*_mixing(spec, layer), *_state_space(names.mamba))
    plain = (*_norms(names, dialect), *mixing, *_mlp(names), *_layerwise(names))
    yield from ((base, TensorRole(name, layer)) for base, name in plain if base is not None)
    for query_or_key, count in ((names.query_norm, spec.num_heads), (names.key_norm, spec.num_kv_heads)):
        name = "attn_q_norm" if query_or_key == names.query_norm else "attn_k_norm"
        if query_or_key is not None and "{head}" in query_or_key:
            yield from ((query_or_key.format(head=head), TensorRole(name, layer, head, count)) for head in range(count))
    if experts is None or names.router is None:
        return
    yield names.router, TensorRole("ffn_gate_inp", layer)
    if names.shared_gate is not None:
        yield names.shared_gate, TensorRole("ffn_gate_inp_shexp", layer)
    if names.router_correction:
        yield names.router_correction, TensorRole(CORRECTION, layer)
    places = (GATES, UPS, "ffn_down_exps")
    for base, name in zip(names.shared_projections or names.expert_projections, places, strict=True):
        yield names.shared_expert + base, TensorRole(name.replace("exps", "shexp"), layer)
    for base, name in zip(names.expert_projections, places, strict=True):
        for index in range(experts.num_experts):
            yield names.expert.format(expert=index) + base, TensorRole(name, layer, index, experts.num_experts)


def _norms(names: WeightNames, dialect: Dialect) -> Iterator[tuple[str | None, str]]:
    """Yields the norms. Where Falcon has two before its halves, the file's first is that of the MLP.

    Falcon H1's name for that of the MLP ends with it, without `.weight`.
    """
    swapped, mlp_norm = dialect is FALCON and names.mlp_norm is not None, names.mlp_norm
    if mlp_norm is not None and dialect is FALCON_H1:
        mlp_norm += ".weight"
    yield names.attention_norm, "attn_norm_2" if swapped else "attn_norm"
    yield mlp_norm, "attn_norm" if swapped else dialect.mlp_norm
    yield names.query_norm, "attn_q_norm"
    yield names.key_norm, "attn_k_norm"
    yield names.attention_post_norm, "post_attention_norm"
    yield names.mlp_post_norm, "post_ffw_norm"


def _mixing(spec: DecoderSpec, layer: int) -> Iterator[tuple[str | None, str]]:
    if spec.layers[layer].convolution is not None:
        return _convolution(spec.names)
    if spec.names.delta is not None and isinstance(spec.layers[layer].state, DeltaSpec):
        return _delta(spec.names.delta)
    return _attention(spec)


def _attention(spec: DecoderSpec) -> Iterator[tuple[str | None, str]]:
    names, latent = spec.names, spec.latent
    yield names.attention_out, "attn_output"
    if latent is not None:
        yield names.query, QUERY if latent.query_rank is None else "attn_q_b"
        yield names.key, LATENT
        yield names.latent, "attn_kv_a_mqa"
        yield names.latent_norm, "attn_kv_a_norm"
        yield names.query_latent, "attn_q_a"
        yield names.query_latent_norm, "attn_q_a_norm"
        return
    if names.query == names.key:
        yield names.query, FUSED
        return
    yield from ((names.query, QUERY), (names.key, KEY), (names.value, VALUE), (names.sinks, "attn_sinks.weight"))


def _layerwise(names: WeightNames) -> Iterator[tuple[str | None, str]]:
    yield names.layer_scale, "layer_output_scale.weight"
    if names.per_layer is not None:
        yield from ((names.per_layer.gate, "inp_gate"), (names.per_layer.out, "proj"), (names.per_layer.norm, "post_norm"))
    if names.beside is not None:
        yield names.beside.mlp_norm, "post_ffw_norm_1"
        yield names.beside.experts_in_norm, "pre_ffw_norm_2"
        yield names.beside.experts_out_norm, "post_ffw_norm_2"
        yield names.beside.input_scale, "ffn_gate_inp.scale"
        yield names.beside.expert_scale, "ffn_down_exps.scale"


def _convolution(names: WeightNames) -> Iterator[tuple[str | None, str]]:
    yield names.convolution_in, "shortconv.in_proj"
    yield names.convolution, "shortconv.conv"
    yield names.convolution_out, "shortconv.out_proj"


def _state_space(names: MambaNames | None) -> Iterator[tuple[str | None, str]]:
    if names is not None:
        yield from ((names.projection, "ssm_in"), (names.convolution, "ssm_conv1d"), (names.out, "ssm_out"))
        yield from ((names.decay, DECAY), (names.skip, SKIP), (names.step, "ssm_dt.bias"), (names.norm, STATE_NORM))


def _delta(names: DeltaNames) -> Iterator[tuple[str | None, str]]:
    """Yields the tensors of a delta rule. Of projections that are one in a checkpoint it yields one."""
    yield names.qkv, FUSED
    yield None if names.z == names.qkv else names.z, DELTA_GATE
    yield from ((names.b, "ssm_ba"),) if names.a == names.b else ((names.b, "ssm_beta"), (names.a, "ssm_alpha"))
    yield from ((names.convolution, "ssm_conv1d"), (names.decay, "ssm_a"), (names.step, "ssm_dt.bias"))
    yield from ((names.norm, "ssm_norm"), (names.out, "ssm_out"))


def _mlp(names: WeightNames) -> Iterator[tuple[str | None, str]]:
    yield None if names.gate == names.up else names.gate, "ffn_gate"
    yield names.up, "ffn_up"
    yield names.down, "ffn_down"
