"""Gemma 4: layers with windows and without have heads of their own; the last ones read the keys of earlier ones."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ryzanstein.worker.architectures.families.experts import moe_spec
from ryzanstein.worker.architectures.families.llama_like import LLAMA_NAMES
from ryzanstein.worker.architectures.layer_heads import BesideNames, HeadsSpec, PerLayerNames, PerLayerSpec
from ryzanstein.worker.architectures.rotary.config import scaling
from ryzanstein.worker.architectures.spec import DecoderSpec, LayerSpec, LongScaling, PartScaling, RotarySpec, RoutingSpec
from ryzanstein.worker.architectures.values import MAX_LAYERS, Values
from ryzanstein.worker.refusal import CheckpointError, excerpt

_PERIOD = 6  # layers, of which the last has no window
_WHOLE, _WINDOWED = "full_attention", "sliding_attention"
_SHARED = ("k_proj.weight", "v_proj.weight", "k_norm.weight", "v_norm.weight")
_PER_LAYER = PerLayerNames(
    table="model.embed_tokens_per_layer",
    projection="model.per_layer_model_projection",
    projection_norm="model.per_layer_projection_norm",
    gate="per_layer_input_gate",
    out="per_layer_projection",
    norm="post_per_layer_input_norm",
)
_BESIDE = BesideNames(
    mlp_norm="post_feedforward_layernorm_1",
    experts_in_norm="pre_feedforward_layernorm_2",
    experts_out_norm="post_feedforward_layernorm_2",
    input_scale="router.scale",
    expert_scale="router.per_expert_scale",
)
GEMMA4_NAMES = replace(
    LLAMA_NAMES,
    query_norm="self_attn.q_norm",
    key_norm="self_attn.k_norm",
    attention_post_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_post_norm="post_feedforward_layernorm",
    layer_scale="layer_scalar",
    per_layer=_PER_LAYER,
    router="router.proj",
    expert="experts.{expert}.",
)
_ROTATIONS: Mapping[str, Mapping[str, Any]] = {
    _WHOLE: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
    _WINDOWED: {"rope_type": "default", "rope_theta": 1e4},
}
GEMMA4_DEFAULTS: Mapping[str, Any] = {
    "tie_word_embeddings": True,
    "vocab_size": 262_144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "max_position_embeddings": 131_072,
    "sliding_window": 512,
    "global_head_dim": 512,
    "vocab_size_per_layer_input": 262_144,
    "hidden_size_per_layer_input": 256,
    "num_kv_shared_layers": 0,
}


def whole_last_layer(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the config with a last layer that has no window, as transformers makes it."""
    kinds, count = config.get("layer_types"), config.get("num_hidden_layers", GEMMA4_DEFAULTS["num_hidden_layers"])
    if kinds is None and isinstance(count, int) and 0 < count <= MAX_LAYERS:
        kinds = [_WINDOWED if (index + 1) % _PERIOD else _WHOLE for index in range(count)]
    if not isinstance(kinds, list) or len(kinds) != count:
        return config
    return {**config, "layer_types": [*kinds[:-1], _WHOLE]}


def gemma4(spec: DecoderSpec, values: Values) -> DecoderSpec:
    """Adds what layers have of their own. Raises CheckpointError, which names the key."""
    kinds = [_WHOLE if layer.window is None else _WINDOWED for layer in spec.layers]
    heads = _heads(spec, values, kinds)
    rotaries = tuple(_rotary(values, kind, heads[kinds.index(kind)].head_dim) for kind in (_WHOLE, _WINDOWED) if kind in kinds)
    order = [kind for kind in (_WHOLE, _WINDOWED) if kind in kinds]
    first_shared = spec.num_layers - values.count("num_kv_shared_layers", least=0, most=spec.num_layers)
    wide = 2 if values.flag("use_double_wide_mlp") else 1
    own = [
        replace(layer, rotary=order.index(kind), attention_scale=1.0, heads=each)
        for layer, kind, each in zip(spec.layers, kinds, heads, strict=True)
    ]
    shared = [_sharing(layer, kinds, first_shared, wide * spec.intermediate_size) for layer in own[first_shared:]]
    per_layer, num_rows = (values.count(f"{key}_per_layer_input", least=0) for key in ("hidden_size", "vocab_size"))
    if per_layer and num_rows < spec.vocab_size:
        raise values.error("vocab_size_per_layer_input", f"is {num_rows}, must be at least vocab_size: {spec.vocab_size}")
    if first_shared < spec.num_layers and not per_layer:
        raise values.error("num_kv_shared_layers", "is not supported without hidden_size_per_layer_input")
    unread = [f"layers.{index}.self_attn.{name}" for index in range(first_shared, spec.num_layers) for name in _SHARED]
    found = replace(
        spec,
        names=replace(spec.names, ignored=(*spec.names.ignored, *unread)),
        layers=(*own[:first_shared], *shared),
        rotaries=rotaries,
        qk_norm=None if spec.qk_norm is None else replace(spec.qk_norm, values=True),
        embedding_scale=math.sqrt(spec.hidden_size),
        logit_cap=values.optional_number("final_logit_softcapping"),
        per_layer=PerLayerSpec(per_layer, num_rows) if per_layer else None,
    )
    return _with_experts(found, values) if values.flag("enable_moe_block") else found


def _heads(spec: DecoderSpec, values: Values, kinds: list[str]) -> list[HeadsSpec]:
    """Returns the heads of each layer. Layers whose keys are wider than the least take two planes."""
    alternative = values.flag("attention_k_eq_v")
    own = _numbered(values.table("per_layer_config"), spec.num_layers)
    if not own.config:
        other = {"head_dim": values.count("global_head_dim")}
        count = values.optional_count("num_global_key_value_heads")
        other |= {} if count is None or not alternative else {"num_key_value_heads": count}
        own = Values({str(index): other for index, kind in enumerate(kinds) if kind == _WHOLE})
    sizes = [_size(spec, own, index) for index in range(spec.num_layers)]
    for index, (size, kind) in enumerate(zip(sizes, kinds, strict=True)):
        if size != sizes[kinds.index(kind)]:
            raise own.error(str(index), f"differs from that of another layer of {kind}: they rotate alike and may share keys")
    widths = {count * dim for count, dim in sizes}
    unit = max(min(widths), -(-max(widths) // 2))
    return [
        HeadsSpec(count, dim, 1 if count * dim <= unit else 2, alternative and kind == _WHOLE)
        for (count, dim), kind in zip(sizes, kinds, strict=True)
    ]


def _numbered(table: Values, num_layers: int) -> Values:
    """Returns a table by layer. transformers writes numbers with as many digits as the largest has."""
    for key, value in table.config.items():
        if not key.isdecimal() or len(key) > 9 or int(key) >= num_layers or not isinstance(value, dict):
            only = f"only an object for each of {num_layers} layers by its number"
            raise CheckpointError(f"config.json: {table.where}{excerpt(key)} is not supported, {only}")
    return Values({str(int(key)): value for key, value in table.config.items()}, table.where)


def _size(spec: DecoderSpec, own: Values, index: int) -> tuple[int, int]:
    """Returns how many key-value heads a layer has, and their size."""
    table = own.table(str(index))
    if unknown := table.config.keys() - {"head_dim", "num_key_value_heads"}:
        raise table.error(min(unknown), "is not supported")
    count, dim = table.count("num_key_value_heads", spec.num_kv_heads), table.count("head_dim", spec.head_dim)
    if spec.num_heads % count or dim % 2:
        raise CheckpointError(
            f"config.json: {spec.num_heads} attention heads of {dim} numbers and {count} key-value heads of layer {index}: "
            "heads must divide over those, and numbers be even"
        )
    return count, dim


def _sharing(layer: LayerSpec, kinds: list[str], first_shared: int, width: int) -> LayerSpec:
    kind = _WHOLE if layer.window is None else _WINDOWED
    source = next((index for index in reversed(range(first_shared)) if kinds[index] == kind), None)
    if source is None or layer.heads is None:
        raise CheckpointError(f"config.json: num_kv_shared_layers leaves no layer of {kind} with keys of its own")
    return replace(layer, heads=replace(layer.heads, shared_with=source), mlp_width=width)


def _rotary(values: Values, kind: str, head_dim: int) -> RotarySpec:
    table = values.table("rope_parameters").table(kind)
    if not values.table("rope_parameters").config:
        table = Values(_ROTATIONS[kind])
    if "rope_type" not in table.config:
        raise table.error("rope_type", "is missing")
    theta = table.number("rope_theta")
    if table.config["rope_type"] != "proportional":
        stretched = scaling(values, table)
        if isinstance(stretched, LongScaling):
            raise table.error("rope_type", "'longrope' is not supported for this architecture")
        return RotarySpec(theta, head_dim, scaling=stretched)
    part = table.number("partial_rotary_factor", 1.0)
    pairs = int(part * head_dim // 2)
    if not 0 < pairs <= head_dim // 2:
        raise table.error("partial_rotary_factor", f"{excerpt(part)} must be above 0 and at most 1")
    return RotarySpec(theta, head_dim, scaling=PartScaling(pairs, table.number("factor", 1.0)))


def _with_experts(spec: DecoderSpec, values: Values) -> DecoderSpec:
    experts = moe_spec(values, values.count("moe_intermediate_size"), RoutingSpec(normalized=True, added=0.0), None)
    layers = tuple(replace(layer, experts=experts) for layer in spec.layers)
    return replace(spec, layers=layers, names=replace(spec.names, beside=_BESIDE))
