"""DeepSeek V2 and V3: multi-head latent attention, routed and shared experts.

The first layers have no experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ryzanstein.worker.architectures.config import Architecture, Choices
from ryzanstein.worker.architectures.families.experts import moe_spec
from ryzanstein.worker.architectures.families.llama_like import LLAMA_NAMES
from ryzanstein.worker.architectures.rotary.config import score_growth
from ryzanstein.worker.architectures.spec import DecoderSpec, GroupLimit, LatentSpec, MoeSpec, RoutingSpec
from ryzanstein.worker.architectures.values import MAX_LAYERS, Values
from ryzanstein.worker.refusal import CheckpointError, excerpt

_LATENT_EPS = 1e-6  # of the latents' norms, independent of rms_norm_eps
_NUM_RATED = {"greedy": None, "group_limited_greedy": 1}  # by topk_method; None: all experts are one group
_NAMES = replace(
    LLAMA_NAMES,
    key="self_attn.kv_b_proj",
    value="self_attn.kv_b_proj",
    latent="self_attn.kv_a_proj_with_mqa",
    latent_norm="self_attn.kv_a_layernorm",
    query_latent="self_attn.q_a_proj",
    query_latent_norm="self_attn.q_a_layernorm",
    router="mlp.gate",
    router_correction="mlp.gate.e_score_correction_bias",
    expert="mlp.experts.{expert}.",
    shared_expert="mlp.shared_experts.",
)
_RENAMED = {
    "head_dim": "qk_rope_head_dim",
    "num_experts": "n_routed_experts",
    "num_mtp_layers": "num_nextn_predict_layers",
}
_DEFAULTS = {"head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "kv_lora_rank": 512, "q_lora_rank": 1536}


def _deepseek_v2(spec: DecoderSpec, values: Values) -> DecoderSpec:
    method = str(values.optional("topk_method"))
    if method not in _NUM_RATED:
        raise CheckpointError(f"config.json: topk_method {excerpt(method)} is not supported, only {', '.join(_NUM_RATED)}")
    routing = RoutingSpec("softmax", scale=values.number("routed_scaling_factor"), groups=_groups(values, _NUM_RATED[method]))
    return sparse_after(with_latents(spec, values), values, routing)


def _deepseek_v3(spec: DecoderSpec, values: Values) -> DecoderSpec:
    return sparse_after(with_latents(without_further_layers(spec, values), values), values, corrected_routing(values))


def corrected_routing(values: Values) -> RoutingSpec:
    """Returns the routing of DeepSeek V3, which others have too: sigmoids, corrected for the choice, in groups."""
    return RoutingSpec(
        "sigmoid",
        normalized=values.flag("norm_topk_prob"),
        scale=values.number("routed_scaling_factor"),
        corrected=True,
        groups=_groups(values, 2),
    )


def without_further_layers(spec: DecoderSpec, values: Values) -> DecoderSpec:
    """Returns the decoder with names by which layers after the last one are not read.

    They predict further tokens. The model is the same without them.
    """
    further = range(spec.num_layers, spec.num_layers + values.count("num_mtp_layers", least=0, most=MAX_LAYERS))
    ignored = (*spec.names.ignored, *(f"{spec.names.layer.format(layer=index)}*" for index in further))
    return replace(spec, names=replace(spec.names, ignored=ignored))


def with_latents(spec: DecoderSpec, values: Values) -> DecoderSpec:
    """Returns the decoder with attention over latents. The head size of `spec` counts only a head's rotated numbers."""
    latent = LatentSpec(
        rank=values.count("kv_lora_rank"),
        query_rank=values.optional_count("q_lora_rank"),
        plain_dim=values.count("qk_nope_head_dim"),
        rotary_dim=spec.head_dim,
        value_dim=values.count("v_head_dim"),
        norm=replace(spec.norm, eps=_LATENT_EPS),
    )
    if spec.num_kv_heads != spec.num_heads:
        raise CheckpointError(f"config.json: num_key_value_heads {spec.num_kv_heads} is not supported, only {spec.num_heads}")
    scale = score_growth(values) * (latent.plain_dim + latent.rotary_dim) ** -0.5
    return replace(
        spec,
        names=spec.names if latent.query_rank is None else replace(spec.names, query="self_attn.q_b_proj"),
        layers=tuple(replace(layer, attention_scale=scale) for layer in spec.layers),
        num_kv_heads=1,
        head_dim=latent.rank + latent.rotary_dim,
        latent=latent,
    )


def sparse_after(spec: DecoderSpec, values: Values, routing: RoutingSpec) -> DecoderSpec:
    """Returns the decoder with experts in all layers but the first few."""
    num_dense = values.count("first_k_dense_replace", least=0)
    return with_experts(spec, values, routing, [index >= num_dense for index in range(spec.num_layers)])


def with_experts(spec: DecoderSpec, values: Values, routing: RoutingSpec, sparse: Sequence[bool]) -> DecoderSpec:
    """Returns the decoder with routed and shared experts in the layers that are `sparse`."""
    width = values.count("moe_intermediate_size")
    experts = moe_spec(values, width, routing, shared_width=width * values.count("n_shared_experts"))
    check_groups(experts)
    layers = (replace(layer, experts=experts if has else None) for layer, has in zip(spec.layers, sparse, strict=True))
    return replace(spec, layers=tuple(layers))


def _groups(values: Values, num_rated: int | None) -> GroupLimit | None:
    return None if num_rated is None else GroupLimit(values.count("n_group"), values.count("topk_group"), num_rated)


def check_groups(experts: MoeSpec) -> None:
    """Raises CheckpointError for impossible groups.

    Groups must be equal in size and have enough experts to be rated by. The chosen groups must have
    enough experts for a token.
    """
    groups = experts.routing.groups
    if groups is None:
        return
    size, rest = divmod(experts.num_experts, groups.num_groups)
    if rest or size < groups.num_rated:
        raise CheckpointError(
            f"config.json: n_group {groups.num_groups} must divide the {experts.num_experts} experts into groups of at least "
            f"{groups.num_rated}"
        )
    if groups.top_k > groups.num_groups or experts.top_k > groups.top_k * size:
        raise CheckpointError(
            f"config.json: topk_group is {groups.top_k} of {groups.num_groups} groups of {size} experts, "
            f"num_experts_per_tok {experts.top_k}"
        )


DEEPSEEK_V2 = Architecture(
    model_type="deepseek_v2",
    title="DeepSeek V2, V2.5, Coder V2",
    names=_NAMES,
    choices=Choices(interleaved=True, qkv_bias="attention_bias", out_bias="attention_bias", mlp_bias="mlp_bias"),
    renamed=_RENAMED,
    defaults={
        **_DEFAULTS,
        "first_k_dense_replace": 0,
        "n_shared_experts": 2,
        "moe_intermediate_size": 1407,
        "routed_scaling_factor": 1.0,
        "topk_method": "greedy",
    },
    required={"scoring_func": "softmax", "norm_topk_prob": False, "moe_layer_freq": 1},
    refine=_deepseek_v2,
    refined="dense first layers, groups of experts where `topk_method` is `group_limited_greedy`",
)
DEEPSEEK_V3 = Architecture(
    model_type="deepseek_v3",
    title="DeepSeek V3, R1, Moonlight",
    names=_NAMES,
    choices=Choices(interleaved="rope_interleave", qkv_bias="attention_bias", out_bias="attention_bias"),
    renamed=_RENAMED,
    defaults={
        **_DEFAULTS,
        "first_k_dense_replace": 3,
        "n_shared_experts": 1,
        "n_group": 8,
        "topk_group": 4,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "num_mtp_layers": 1,
        "rope_interleave": True,
    },
    required={"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1},
    refine=_deepseek_v3,
    refined="dense first layers, groups of experts, `num_nextn_predict_layers` further layers not read",
)
