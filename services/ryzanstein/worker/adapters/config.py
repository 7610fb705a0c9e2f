"""adapter_config.json, as `LoraConfig` of peft writes it: which modules it targets, and how their factors are scaled.

Each field is served, changes nothing, or is refused by name unless it has the value that changes nothing. So is a field that
is not known.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ryzanstein.worker.adapters.patterns import fault_of
from ryzanstein.worker.adapters.unfit import MERGE, AdapterUnfit

MAX_RANK = 512
ALL_LINEAR = "all-linear"

SERVED = frozenset(
    {
        *("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "lora_bias", "ensure_weight_tying"),
        *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
    }
)
"""Fields that are read."""
HARMLESS = frozenset(
    {
        *("auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode", "runtime_config"),
        *("lora_dropout", "fan_in_fan_out", "megatron_core", "eva_config", "qalora_group_size"),
    }
)
"""Fields that change nothing of what an adapter computes: how it was trained, or how peft would merge it."""
_INITIAL = ("gaussian", "eva", "orthogonal", "mica")
_CHANGED_BASE = "the weights of the base were changed before training, and the adapter fits only those"
REFUSED: Mapping[str, str] = {
    "use_dora": f"DoRA scales each output of the whole weight: {MERGE}",
    "modules_to_save": f"whole modules are saved beside the factors: {MERGE}",
    "trainable_token_indices": f"single tokens were trained: {MERGE}",
    "target_parameters": f"parameters that are no modules, such as experts, take no adapter: {MERGE}",
    "layer_replication": "layers are repeated: the model has other layers than its base",
    "alora_invocation_tokens": "an activated adapter (aLoRA) applies to a part of a prompt, which is not served",
    "use_qalora": f"QA-LoRA averages inputs first: {MERGE}",
    "use_bdlora": f"block-diagonal factors: {MERGE}",
    "arrow_config": "a router of several adapters (Arrow) is not served",
    "kasa_config": f"KaSA has a diagonal between the factors and changes the base: {MERGE}",
    "velora_config": "VeLoRA is not served",
    "monteclora_config": "factors that are drawn at random (MonteCLoRA) are not served",
    "megatron_config": "layers of Megatron are not served",
    "loftq_config": f"LoftQ: {_CHANGED_BASE}",
    "corda_config": f"CorDA: {_CHANGED_BASE}",
    "lora_ga_config": f"LoRA-GA: {_CHANGED_BASE}",
}
"""Fields that must be empty, and why."""


@dataclass(frozen=True, slots=True)
class LoraRules:
    """What the configuration says of a module, by its name in transformers' model."""

    rank: int
    alpha: float
    by_root: bool
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]
    has_bias: bool
    ties_head: bool
    targets: Sequence[str] | str | None
    excluded: Sequence[str] | str
    layers: Sequence[int]
    layer_lists: Sequence[str]

    def rank_of(self, module: str) -> int:
        return int(self.ranks.get(_pattern_of(self.ranks, module), self.rank))

    def scale_of(self, module: str) -> float:
        """Returns what x A B is multiplied by: alpha over the rank, or over its root (Kalajdzievski 2023)."""
        rank, alpha = self.rank_of(module), self.alphas.get(_pattern_of(self.alphas, module), self.alpha)
        return alpha / (math.sqrt(rank) if self.by_root else rank)

    def claims(self, module: str, *, is_end: bool) -> bool:
        """Returns whether peft would adapt a module of this name. `is_end`: it is an embedding or the head."""
        if _is_among(self.excluded, module) or self.targets is None:
            return False
        if isinstance(self.targets, str):
            if self.targets.lower() == ALL_LINEAR:
                return not is_end
            return re.fullmatch(self.targets, module) is not None
        if module in self.targets:
            return True
        return _is_among(self.targets, module) and (not self.layers or self._layer_of(module) in self.layers)

    def _layer_of(self, module: str) -> int | None:
        if not self.layer_lists:
            found = re.match(r".*?\.[^.]*\.(?P<layer>\d+)\.", module)
        else:
            matches = (re.match(rf"(?:^|.*?\.){name}\.(?P<layer>\d+)\.", module) for name in self.layer_lists)
            found = next((match for match in matches if match is not None), None)
        return None if found is None else int(found["layer"])


def rules_of(config: Mapping[str, Any]) -> LoraRules:
    """Returns the rules of a configuration. Raises AdapterUnfit, which names a field."""
    _refuse_other_type(config)
    for field, value in config.items():
        if field in REFUSED and value:
            raise AdapterUnfit(field, REFUSED[field])
        if field not in _KNOWN and not _is_empty(value):
            raise AdapterUnfit(field, "is not known, so it is not known what it changes")
    rules = LoraRules(
        rank=_read(config, "r", 8, _is_rank),
        alpha=_read(config, "lora_alpha", 8, _is_number),
        by_root=_read(config, "use_rslora", False, _is_flag),
        ranks=_read(config, "rank_pattern", {}, lambda value: _is_table(value, _is_rank)),
        alphas=_read(config, "alpha_pattern", {}, lambda value: _is_table(value, _is_number)),
        has_bias=_read(config, "lora_bias", False, _is_flag),
        ties_head=_read(config, "ensure_weight_tying", False, _is_flag),
        targets=_read(config, "target_modules", None, _is_names),
        excluded=_read(config, "exclude_modules", (), _is_names),
        layers=_listed(_read(config, "layers_to_transform", (), _is_layers)),
        layer_lists=_listed(_read(config, "layers_pattern", (), _is_names)),
    )
    _refuse_broken_patterns(rules)
    if rules.layers and isinstance(rules.targets, str):
        raise AdapterUnfit("layers_to_transform", "goes with a list of target_modules, not with a pattern")
    return rules


def _refuse_other_type(config: Mapping[str, Any]) -> None:
    if config.get("peft_type") != "LORA":
        raise AdapterUnfit("peft_type", f"is {config.get('peft_type')!r:.100}, and only LORA is served")
    if config.get("task_type") not in (None, "CAUSAL_LM", "FEATURE_EXTRACTION"):
        raise AdapterUnfit("task_type", f"is {config['task_type']!r:.100}, and only CAUSAL_LM is served")
    if config.get("bias", "none") != "none":
        raise AdapterUnfit("bias", f"is {config['bias']!r:.100}: biases of the base were trained: {MERGE}")
    initial = config.get("init_lora_weights", True)
    if not isinstance(initial, bool | None) and not (isinstance(initial, str) and initial.lower() in _INITIAL):
        raise AdapterUnfit("init_lora_weights", f"is {initial!r:.100}: {_CHANGED_BASE}")


_KNOWN = {*SERVED, *HARMLESS, *REFUSED, "peft_type", "task_type", "bias", "init_lora_weights"}


def _read(config: Mapping[str, Any], field: str, default: Any, is_fit: Callable[[Any], bool]) -> Any:
    value = config.get(field)
    if value is None:
        return default
    if not is_fit(value):
        raise AdapterUnfit(field, f"has an impossible value, {value!r:.100}")
    return value


def _listed(value: Any) -> Sequence[Any]:
    return (value,) if isinstance(value, int | str) and value != "" else tuple(value)


def _is_empty(value: object) -> bool:
    return value is None or value is False or value in ("", [], {})


def _is_flag(value: object) -> bool:
    return isinstance(value, bool)


def _is_rank(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MAX_RANK


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e30  # and not NaN


def _is_table(value: object, is_fit: Callable[[Any], bool]) -> bool:
    return isinstance(value, dict) and all(map(is_fit, value.values()))


def _is_names(value: object) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and all(isinstance(name, str) for name in value))


def _is_layers(value: object) -> bool:
    several = value if isinstance(value, list) else [value]
    return all(isinstance(layer, int) and not isinstance(layer, bool) for layer in several)


def _is_among(names: Sequence[str] | str, module: str) -> bool:
    if isinstance(names, str):
        return bool(names) and re.fullmatch(names, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in names)


def _pattern_of(patterns: Mapping[str, Any], module: str) -> str:
    """Returns the first pattern that matches the end of a module's name, or the name."""
    return next((pattern for pattern in patterns if re.match(rf"(.*\.)?({pattern})$", module)), module)


def _refuse_broken_patterns(rules: LoraRules) -> None:
    """Raises AdapterUnfit for what is no regular expression, or may take forever."""
    wholes = {"target_modules": rules.targets, "exclude_modules": rules.excluded}
    patterns = [(field, value) for field, value in wholes.items() if isinstance(value, str)]
    patterns += [("rank_pattern", key) for key in rules.ranks] + [("alpha_pattern", key) for key in rules.alphas]
    patterns += [("layers_pattern", name) for name in rules.layer_lists]
    for field, pattern in patterns:
        fault = fault_of(pattern)
        if fault:
            raise AdapterUnfit(field, f"{pattern!r:.100} {fault}")
