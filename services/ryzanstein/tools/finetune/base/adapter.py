"""Puts an adapter into a model with peft."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from ryzanstein.tools.finetune.request import LoraShape
from ryzanstein.worker.architectures.spec import DecoderSpec
from ryzanstein.worker.refusal import ModelRefused, excerpt

_ALL, _ATTENTION = ("all",), ("attention",)


def targets_of(model: Any, spec: DecoderSpec, wanted: Sequence[str]) -> list[str]:
    """Returns the ends of the names of the modules that get an adapter. Raises ModelRefused.

    Of all linear layers these are not among them: the head, routers of experts, the projection from a latent
    that is absorbed where it is served, and what follows the states of a Mamba layer.
    """
    head = model.get_output_embeddings()
    found = {path: module for path, module in model.named_modules() if _is_linear(module) and module is not head}
    ends = dict.fromkeys(path.rpartition(".")[2] for path in found)
    kept = [end for end in ends if end not in _left_out(spec)]
    chosen = list(kept)
    if tuple(wanted) == _ATTENTION:
        attention = _attention(spec)
        chosen = [end for end in kept if end in attention]
    elif tuple(wanted) != _ALL:
        unknown = sorted(set(wanted) - ends.keys())
        if unknown:
            raise ModelRefused(f"--targets: the model has no linear layers {excerpt(unknown)}, only {', '.join(kept)}")
        chosen = list(wanted)
    if not chosen:
        raise ModelRefused(f"--targets: model_type {excerpt(spec.model_type)} has no such linear layers")
    return chosen


def _is_linear(module: nn.Module) -> bool:
    from transformers.pytorch_utils import Conv1D

    return isinstance(module, nn.Linear | Conv1D)


def _ends(names: Iterable[str | None]) -> set[str]:
    return {name.rpartition(".")[2] for name in names if name}


def _left_out(spec: DecoderSpec) -> set[str]:
    """Returns the ends of names that are linear layers and get no adapter."""
    names = spec.names
    mixer_out = names.mamba.out if names.mamba is not None else None  # its class multiplies by the weight itself
    return _ends([names.head, names.router, names.shared_gate, "kv_b_proj" if names.latent else None, mixer_out])


def _attention(spec: DecoderSpec) -> set[str]:
    names = spec.names
    latent = (names.latent, names.query_latent, "q_b_proj")
    return _ends([names.query, names.key, names.value, names.attention_out, *(latent if names.latent else ())])


def with_adapter(model: nn.Module, targets: Sequence[str], shape: LoraShape, seed: int) -> Any:
    """Returns the model of peft: the base with an adapter that changes nothing yet. The seed fixes its numbers."""
    from peft import LoraConfig, get_peft_model

    alpha: Any = int(shape.alpha) if shape.alpha.is_integer() else shape.alpha
    config = LoraConfig(
        r=shape.rank,
        lora_alpha=alpha,
        lora_dropout=0.0,
        target_modules=list(targets),
        bias="none",
        task_type="CAUSAL_LM",
        fan_in_fan_out=_has_conv(model),
    )
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of deprecated names that peft uses, and of layers with transposed weights
        return get_peft_model(model, config)


def _has_conv(model: nn.Module) -> bool:
    from transformers.pytorch_utils import Conv1D

    return any(isinstance(module, Conv1D) for module in model.modules())
