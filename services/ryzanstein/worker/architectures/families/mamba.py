"""What config.json says of layers of Mamba 2, in the words of Granite 4, Falcon H1 and Nemotron H."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ryzanstein.worker.architectures.mixers import MambaNames, MambaSpec
from ryzanstein.worker.architectures.spec import DecoderSpec
from ryzanstein.worker.architectures.values import Values
from ryzanstein.worker.refusal import excerpt

MAMBA = "linear_attention"
ATTENTION = "full_attention"
_KINDS = {"mamba": MAMBA, "attention": ATTENTION, "hybrid": "hybrid"}
MAX_LENGTH = 64  # known models have 4
MAX_DIM = 1024  # known models have at most 256

MAMBA_DEFAULTS: Mapping[str, Any] = {
    "mamba_n_heads": 128,
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_head": "auto",
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
}


def mamba_names(prefix: str) -> MambaNames:
    """Returns the names of a mixer's tensors."""
    return MambaNames(
        projection=f"{prefix}in_proj",
        convolution=f"{prefix}conv1d",
        decay=f"{prefix}A_log",
        step=f"{prefix}dt_bias",
        skip=f"{prefix}D",
        norm=f"{prefix}norm",
        out=f"{prefix}out_proj",
    )


def layer_kinds(values: Values, num_layers: int, known: tuple[str, ...]) -> list[str] | None:
    """Returns what each layer is, by transformers' newest words; None if config.json does not say.

    Raises CheckpointError for kinds that are not `known`, or too many of them.
    """
    kinds = values.per_layer("layer_types", num_layers)
    kinds = values.per_layer("layers_block_type", num_layers) if kinds is None else kinds
    if kinds is None:
        return None
    if len(kinds) > num_layers:
        raise values.error("layer_types", f"must have {num_layers} entries, got {len(kinds)}")
    found = [_KINDS.get(kind, kind) if isinstance(kind, str) else kind for kind in kinds]
    unknown = next((kind for kind in found if kind not in known), None)
    if unknown is not None:
        raise values.error("layer_types", f"{excerpt(unknown)} is not supported, only {' and '.join(known)}")
    return found


def mamba_spec(spec: DecoderSpec, values: Values, width: int) -> MambaSpec:
    """Returns the state space of Granite 4 and Falcon H1, whose heads put out `width` numbers."""
    num_heads, num_groups = values.count("mamba_n_heads"), values.count("mamba_n_groups")
    head_dim = width // num_heads if values.optional("mamba_d_head") == "auto" else values.count("mamba_d_head", most=MAX_DIM)
    if num_heads * head_dim != width:
        raise values.error("mamba_n_heads", f"is {num_heads} of {head_dim} numbers, which are not the {width} of the layer")
    biased = values.flag("mamba_proj_bias")
    return MambaSpec(
        num_heads=num_heads,
        num_groups=checked_groups(values, "mamba_n_groups", num_groups, num_heads),
        head_dim=head_dim,
        state_dim=values.count("mamba_d_state", most=MAX_DIM),
        length=values.count("mamba_d_conv", most=MAX_LENGTH),
        activation=spec.activation,
        convolution_bias=values.flag("mamba_conv_bias"),
        in_bias=biased,
        out_bias=biased,
        step_limits=step_limits(values),
    )


def checked_groups(values: Values, key: str, num_groups: int, num_heads: int) -> int:
    """Returns the number of groups. Raises CheckpointError if heads do not divide over them."""
    if num_heads % num_groups:
        raise values.error(key, f"is {num_groups}, over which {num_heads} heads do not divide")
    return num_groups


def step_limits(values: Values) -> tuple[float, float]:
    """Returns the bounds of steps. Raises CheckpointError for what are no two numbers in order."""
    given = values.optional("time_step_limit")
    if given is None:
        return 0.0, float("inf")
    bounds = [_bound(each) for each in given] if isinstance(given, list) and len(given) == 2 else [None]
    least, most = bounds[0], bounds[-1]
    if least is None or most is None or not least <= most:
        raise values.error("time_step_limit", f"must be two numbers in order, got {excerpt(given)}")
    return least, most


def _bound(value: object) -> float | None:
    """Returns a number, which transformers 5 writes in words if it is not finite; None if it is no number."""
    if isinstance(value, dict):
        return float("inf") if value.get("__float__") == "Infinity" else None
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
