"""Reads a Hugging Face `config.json` into a DecoderSpec.

Unknown options are refused by name: nothing that could change a logit is ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ryzanstein.worker.architectures.foreign import refuse_foreign
from ryzanstein.worker.architectures.mixers import Activation
from ryzanstein.worker.architectures.rotary.config import Rotated, rotary, served_context
from ryzanstein.worker.architectures.spec import (
    AlibiSpec,
    DecoderSpec,
    LayerSpec,
    NormSpec,
    QkNormSpec,
    QkvLayout,
    RotarySpec,
    WeightNames,
)
from ryzanstein.worker.architectures.values import MAX_LAYERS, Values
from ryzanstein.worker.refusal import CheckpointError, excerpt

ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "relu2": "relu2",
}
_WINDOWED = {"full_attention": False, "sliding_attention": True}

Flag = bool | str
"""A choice that all checkpoints of an architecture share, or the config.json key that makes it."""


@dataclass(frozen=True, slots=True)
class Choices:
    """The choices that distinguish an architecture from Llama, whose choices are the defaults.

    `qk_norm_last`: queries and keys are normed after they are rotated.
    """

    norm: Literal["rms", "layer"] = "rms"
    norm_weight: bool = True
    norm_bias: bool = False
    norm_plus_one: bool = False
    qk_norm: Literal["shared", "heads", "head_list", "width"] | None = None
    qk_norm_bias: bool = False
    qk_norm_last: bool = False
    qk_normed: Flag = True
    positions: Literal["rotary", "alibi", "learned", "none"] = "rotary"
    position_offset: int = 0
    rotated: Rotated = "whole"
    interleaved: Flag = False
    qkv_layout: QkvLayout = "split"
    transposed: bool = False
    parallel: Flag = False
    qkv_bias: Flag = False
    out_bias: Flag = False
    mlp_bias: Flag = False
    head_bias: bool = False
    windowed: Callable[[Values, int], bool] | None = None
    """Whether a layer has config.json's window, without layer_types. None: no layer has it."""
    layer_types: bool = True
    """Whether layer_types of config.json is used."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """A row of the table: config.json's `model_type`, tensor names, and differences from Llama.

    `renamed` maps Llama's keys to this architecture's keys. `defaults` has the values that
    transformers uses for absent keys, `fixed` the values that transformers uses whatever the file
    has. `required` has the only supported value of each option that would change the model. `older`
    rewrites old spellings that only this architecture had. `refine` adds what the tables cannot
    express; `refined` describes it in words. `unequal`: it reads `per_layer_config`.
    """

    model_type: str
    title: str
    names: WeightNames
    choices: Choices = field(default_factory=Choices)
    renamed: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    required: Mapping[str, Any] = field(default_factory=dict)
    older: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None
    refine: Callable[[DecoderSpec, Values], DecoderSpec] | None = None
    refined: str = ""
    unequal: bool = False

    def spec(self, config: Mapping[str, Any]) -> DecoderSpec:
        """Returns the decoder that `config` describes.

        Raises CheckpointError, which names the key that is missing, wrong or unknown.
        """
        config = config if self.older is None else self.older(config)
        refuse_foreign(config, unequal=self.unequal)
        values = Values(config, renamed=self.renamed, defaults=self.defaults, fixed=self.fixed)
        values.refuse_contradictions()
        for key, only in self.required.items():
            if config.get(key, only) not in (only, None):
                raise CheckpointError(f"config.json: {key} {excerpt(config[key])} is not supported, only {only!r}")
        spec = self._spec(values)
        return spec if self.refine is None else self.refine(spec, values)

    def _spec(self, values: Values) -> DecoderSpec:
        choices = self.choices
        hidden_size, num_heads = values.count("hidden_size"), values.count("num_attention_heads")
        head_dim = values.count("head_dim", max(1, hidden_size // num_heads))
        norm = self._norm(values)
        rotaries = _rotaries(values, head_dim, choices)
        return DecoderSpec(
            model_type=self.model_type,
            names=self.names,
            layers=_layers(values, choices, 0 if rotaries else None, head_dim**-0.5),
            hidden_size=hidden_size,
            num_heads=num_heads,
            num_kv_heads=_divisor(values.count("num_key_value_heads", num_heads), num_heads),
            head_dim=head_dim,
            intermediate_size=values.count("intermediate_size", 4 * hidden_size if self._quadruple else None),
            vocab_size=values.count("vocab_size"),
            context_length=self.context_length(values),
            norm=norm,
            activation=activation_of(values),
            rotaries=rotaries,
            alibi=AlibiSpec() if choices.positions == "alibi" else None,
            position_offset=choices.position_offset,
            qk_norm=self._qk_norm(values, norm),
            qkv_layout=choices.qkv_layout,
            transposed=choices.transposed,
            parallel=_chosen(values, choices.parallel),
            qkv_bias=_chosen(values, choices.qkv_bias),
            out_bias=_chosen(values, choices.out_bias),
            mlp_bias=_chosen(values, choices.mlp_bias),
            head_bias=choices.head_bias,
            tied_head=values.flag("tie_word_embeddings"),
        )

    @property
    def _quadruple(self) -> bool:
        """Whether the MLP's default width is four times the model's: for all without a gate."""
        return self.names.gate is None

    def context_length(self, values: Values) -> int:
        """Returns how many tokens a sequence may have."""
        scaled = self.choices.positions == "rotary" and self.choices.rotated in ("whole", "factor")
        return served_context(values) if scaled else values.count("max_position_embeddings")

    def _norm(self, values: Values) -> NormSpec:
        choices = self.choices
        eps = values.number("rms_norm_eps", 1e-6)
        return NormSpec(choices.norm, eps, choices.norm_weight, choices.norm_bias, choices.norm_plus_one)

    def _qk_norm(self, values: Values, norm: NormSpec) -> QkNormSpec | None:
        choices = self.choices
        if choices.qk_norm is None or not _chosen(values, choices.qk_normed):
            return None
        return QkNormSpec(
            NormSpec(norm.kind, norm.eps, True, choices.qk_norm_bias, norm.plus_one), choices.qk_norm, choices.qk_norm_last
        )


def _chosen(values: Values, flag: Flag) -> bool:
    return values.flag(flag) if isinstance(flag, str) else flag


def _rotaries(values: Values, head_dim: int, choices: Choices) -> tuple[RotarySpec, ...]:
    if choices.positions != "rotary" or choices.rotated == "kinds":
        return ()
    return (rotary(values, head_dim, choices.rotated, interleaved=_chosen(values, choices.interleaved)),)


def _layers(values: Values, choices: Choices, rotary_index: int | None, scale: float) -> tuple[LayerSpec, ...]:
    num_layers = values.count("num_hidden_layers", most=MAX_LAYERS)
    windowed = _windowed(values, choices, num_layers)
    if any(windowed):
        values.refuse_null("sliding_window")
    return tuple(
        LayerSpec(window=values.count("sliding_window") if has else None, rotary=rotary_index, attention_scale=scale)
        for has in windowed
    )


def _windowed(values: Values, choices: Choices, num_layers: int) -> list[bool]:
    if choices.windowed is None:
        return [False] * num_layers
    kinds = values.per_layer("layer_types", num_layers) if choices.layer_types else None
    if kinds is None:
        return [choices.windowed(values, index) for index in range(num_layers)]
    if len(kinds) > num_layers:
        raise values.error("layer_types", f"must be a list of {num_layers} entries, got {len(kinds)}")
    unknown = next((kind for kind in kinds if not isinstance(kind, str) or kind not in _WINDOWED), None)
    if unknown is not None:
        raise values.error("layer_types", f"{excerpt(unknown)} is not supported, only {list(_WINDOWED)}")
    return [_WINDOWED[kind] for kind in kinds]


def _divisor(num_kv_heads: int, num_heads: int) -> int:
    if num_heads % num_kv_heads:
        raise CheckpointError(f"config.json: {num_heads} attention heads do not divide over {num_kv_heads} key-value heads")
    return num_kv_heads


def activation_of(values: Values, key: str = "hidden_act") -> Activation:
    """Returns the activation that a key names. Raises CheckpointError."""
    name = values.optional(key)
    name = values.defaults.get(key, "silu") if name is None else name
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise values.error(key, f"{excerpt(name)} is not supported, only {sorted(ACTIVATIONS)}")
    return ACTIVATIONS[name]
