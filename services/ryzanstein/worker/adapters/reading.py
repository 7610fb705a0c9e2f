"""Reads an adapter's directory as peft writes it, and checks all of it: every tensor lands on a weight, every target has its
tensors. What cannot be served is refused as a whole: an adapter that is applied in part answers wrongly without an error.

Legend: I inputs, R ranks, O outputs.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ryzanstein.worker.adapters.config import MAX_RANK, LoraRules, rules_of
from ryzanstein.worker.adapters.factors import AdaptedWeight, Adapter, Shapes
from ryzanstein.worker.adapters.gguf import read_gguf_adapter
from ryzanstein.worker.adapters.names import Spelling, is_embedding, is_head, of_copy, parsed, weight_of
from ryzanstein.worker.adapters.tensors import Floats, read_floats, stored_numbers
from ryzanstein.worker.adapters.unfit import AdapterUnfit
from ryzanstein.worker.checkpoints.tensor_entry import TensorEntry
from ryzanstein.worker.checkpoints.tensor_files import read_header, read_tensor_files
from ryzanstein.worker.json_files import UnreadableFile, read_object
from ryzanstein.worker.refusal import CheckpointError

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
_PICKLE = "adapter_model.bin"


def read_adapter(path: Path, adaptable: Shapes, base: Path | None = None) -> Adapter:
    """Returns the adapter in a directory, or in a GGUF file, for a model with these weights.

    `base` is the directory or the file of the model. It is read only for a GGUF file, and where the adapter has a copy of an
    embedding, which must be that of the model. Raises AdapterUnfit, which names the tensor or the field that is at fault.
    """
    if path.is_file() and base is not None:
        return read_gguf_adapter(path, adaptable, base)
    config = _config(path)
    rules = rules_of(config)
    entries = _entries(path)
    copies = {name: copy for name in entries if (copy := of_copy(name)) is not None}
    found = _Found.of({name: entry for name, entry in entries.items() if name not in copies}, adaptable)
    for name, (module, kind) in copies.items():
        weight = weight_of(module, adaptable, name)
        tied = [each for each in adaptable if is_head(weight) and adaptable[each] == adaptable[weight][::-1]]
        own = [f"{each}.{kind}" for stem in (weight, *tied) for each in (stem, stem.partition(".")[2])]
        _refuse_other_copy(entries[name], own, base)
    weights = {name: found.weight(name, rules, adaptable[name]) for name in found.parts}
    found.refuse_missing(rules, adaptable)  # after the shapes, which say more of an adapter of another model
    if rules.ties_head:
        weights |= _tied(weights, adaptable)
    named = config.get("base_model_name_or_path")
    return Adapter(weights, named if isinstance(named, str) else "")


def _config(path: Path) -> Mapping[str, object]:
    try:
        return read_object(path / CONFIG)
    except UnreadableFile as error:
        raise AdapterUnfit(CONFIG, str(error)) from error


def _entries(path: Path) -> Mapping[str, TensorEntry]:
    if not os.path.lexists(path / TENSORS) and os.path.lexists(path / _PICKLE):
        raise AdapterUnfit(_PICKLE, "is a pickle, which can run any program: save the adapter as safetensors")
    try:
        entries = read_header(path / TENSORS)
    except CheckpointError as error:
        raise AdapterUnfit(TENSORS, str(error)) from error
    if not entries:
        raise AdapterUnfit(TENSORS, "has no tensors")
    return entries


@dataclass(frozen=True, slots=True)
class _Found:
    """The tensors of each weight by what they are, and the module that the adapter calls it."""

    parts: Mapping[str, Mapping[str, TensorEntry]]
    modules: Mapping[str, str]

    @classmethod
    def of(cls, entries: Mapping[str, TensorEntry], adaptable: Shapes) -> _Found:
        parts: dict[str, dict[str, TensorEntry]] = {}
        modules: dict[str, str] = {}
        for name, entry in entries.items():
            tensor = parsed(name)
            weight = weight_of(tensor.module, adaptable, name)
            if modules.setdefault(weight, tensor.module) != tensor.module:
                raise AdapterUnfit(name, f"is another module of weight {weight}, which {modules[weight]} is already")
            parts.setdefault(weight, {})[tensor.part] = entry
        if not parts:
            raise AdapterUnfit(TENSORS, "has no factors")
        return cls(parts, modules)

    def refuse_missing(self, rules: LoraRules, adaptable: Shapes) -> None:
        """Raises AdapterUnfit unless those weights have tensors that the configuration targets."""
        spelling = Spelling.of((module, weight) for weight, module in self.modules.items())
        for weight in adaptable:
            module = self.modules.get(weight, spelling.module(weight))
            claimed = rules.claims(module, is_end=is_embedding(weight) or is_head(weight))
            if claimed and weight not in self.parts and not (rules.ties_head and is_head(weight)):
                raise AdapterUnfit("target_modules", f"{module} is a target, but {TENSORS} has no tensors of it")
            # A set of names that peft found itself is not compared: it says the same.
            if weight in self.parts and not claimed and rules.targets is not None:
                if rules.ties_head and (is_embedding(weight) or is_head(weight)):
                    continue
                first = next(iter(self.parts[weight].values()))
                raise AdapterUnfit(first.name, f"{module} is no target of {CONFIG}")

    def weight(self, name: str, rules: LoraRules, shape: tuple[int, int]) -> AdaptedWeight:
        """Returns the factors of a weight. Raises AdapterUnfit."""
        parts, module = self.parts[name], self.modules[name]
        a, b = ("embedding_a", "embedding_b") if is_embedding(name) else ("a", "b")
        wrong = next((entry for part, entry in parts.items() if part not in (a, b, "bias")), None)
        if wrong is not None:
            kind = "an embedding" if is_embedding(name) else "a weight"
            raise AdapterUnfit(wrong.name, f"is none of the factors that {kind} has")
        missing = next((part for part in (a, b) if part not in parts), None)
        if missing is not None:
            raise AdapterUnfit(next(iter(parts.values())).name, f"the other factor of {module} is missing")
        _check_shapes(parts[a], parts[b], shape, rules.rank_of(module))
        bias = self._bias(name, rules, shape[1])
        scale = rules.scale_of(module)
        return AdaptedWeight(read_floats(parts[a]), read_floats(parts[b]), bias, scale)

    def _bias(self, name: str, rules: LoraRules, num_outputs: int) -> Floats | None:
        entry = self.parts[name].get("bias")
        if entry is None:
            if rules.has_bias and not is_embedding(name):
                raise AdapterUnfit("lora_bias", f"is true, but {TENSORS} has no bias of {self.modules[name]}")
            return None
        if not rules.has_bias or is_embedding(name):
            raise AdapterUnfit(entry.name, "is there although lora_bias is false")
        if entry.shape != (num_outputs,):
            raise AdapterUnfit(entry.name, f"has shape {list(entry.shape)}, the weight has {num_outputs} outputs")
        return read_floats(entry)


def _check_shapes(a: TensorEntry, b: TensorEntry, shape: tuple[int, int], rank: int) -> None:
    num_inputs, num_outputs = shape
    if len(a.shape) != 2 or a.shape[1] != num_inputs:
        raise AdapterUnfit(a.name, f"has shape {list(a.shape)}, the weight has {num_inputs} inputs")
    if a.shape[0] != rank or rank > MAX_RANK:
        raise AdapterUnfit(a.name, f"has rank {a.shape[0]}, {CONFIG} says {rank}, at most {MAX_RANK} are served")
    if b.shape != (num_outputs, rank):
        raise AdapterUnfit(b.name, f"has shape {list(b.shape)}, must be {[num_outputs, rank]}")


def _tied(weights: Mapping[str, AdaptedWeight], adaptable: Shapes) -> Mapping[str, AdaptedWeight]:
    """Returns the head's factors, those of the embedding turned around, if the adapter lacks them.

    Raises AdapterUnfit if it has others.
    """
    head = next((name for name in adaptable if is_head(name)), None)
    turned = None if head is None else adaptable[head][::-1]
    embedding = next((each for name, each in weights.items() if is_embedding(name) and adaptable[name] == turned), None)
    if head is None or embedding is None:
        return {}
    own = weights.get(head)
    if own is None:
        return {head: AdaptedWeight(embedding.b_OR.T, embedding.a_RI.T, None, embedding.scale)}
    if not (np.array_equal(own.a_RI, embedding.b_OR.T) and np.array_equal(own.b_OR, embedding.a_RI.T)):
        raise AdapterUnfit("ensure_weight_tying", "is true, but the factors of embedding and head differ")
    return {}


def _refuse_other_copy(entry: TensorEntry, names: Sequence[str], base: Path | None) -> None:
    """Raises AdapterUnfit unless what is saved is the first of these tensors that the model's files have."""
    advice = "save the adapter with save_embedding_layers=False if the vocabulary was not changed"
    if base is None:
        raise AdapterUnfit(entry.name, f"is a weight of the model, which cannot be compared with it here: {advice}")
    try:
        stored = read_tensor_files(base)
        own = next((stored[name] for name in names if name in stored), None)
        same = own is not None and own.shape == entry.shape and _are_equal(own, entry)
    except (CheckpointError, OSError) as error:
        raise AdapterUnfit(entry.name, f"cannot be compared with the model's own weight: {error}") from error
    if not same:
        raise AdapterUnfit(entry.name, "is not the model's own weight: its vocabulary was changed, or it is of another model")


def _are_equal(own: TensorEntry, copy: TensorEntry) -> bool:
    """Returns whether numbers are equal, or were until they were rounded to the dtype of the copy."""
    if own.dtype == copy.dtype:
        return bool(np.array_equal(stored_numbers(own), stored_numbers(copy)))
    ours, theirs = read_floats(own), read_floats(copy)
    if copy.dtype == "F16":
        ours = ours.astype(np.float16).astype(np.float32)
    if copy.dtype == "BF16":  # to nearest, half to even
        bits = ours.view(np.uint32)
        ours = ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)
    return bool(np.array_equal(ours, theirs))
