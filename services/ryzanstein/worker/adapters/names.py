"""The names of an adapter's tensors: those of modules in transformers' model, and the weights of a checkpoint that they are.

The names differ where a model's text half is served alone, where the class has other names than the files, and in
adapters of a bare model, which lacks the first part of every name.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from ryzanstein.worker.adapters.unfit import MERGE, AdapterUnfit

_PREFIX = "base_model.model."
_OTHER_BEGINNINGS = (
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.", "model."),
    ("language_model.lm_head", "lm_head"),
    ("model.", "backbone."),
    ("lm_head", "embed_out"),
    ("embed_out", "lm_head"),
)
"""How modules begin that a checkpoint's tensors begin otherwise."""
_EMBEDDINGS = ("embed_tokens", "wte", "word_embeddings", "embed_in", "embeddings", "embed_tokens_per_layer", "tok_embeddings")
_HEADS = ("lm_head", "embed_out", "output")
PARTS = {
    ".lora_A.weight": "a",
    ".lora_B.weight": "b",
    ".lora_B.bias": "bias",
    ".lora_embedding_A": "embedding_a",
    ".lora_embedding_B": "embedding_b",
}
"""How the names of a module's tensors end, and what they are."""
_COPIES = (".base_layer.weight", ".base_layer.bias", ".weight", ".bias")
"""The ends of the names of an embedding's or a head's own tensors, which peft may save beside the factors."""


@dataclass(frozen=True, slots=True)
class AdapterTensorName:
    """A tensor's name: the module in transformers' model, and which of `PARTS` of it."""

    module: str
    part: str


def parsed(name: str) -> AdapterTensorName:
    """Returns what a tensor's name says. Raises AdapterUnfit."""
    for end, part in PARTS.items():
        if name.endswith(end):
            return AdapterTensorName(name.removesuffix(end).removeprefix(_PREFIX), part)
    if ".lora_magnitude_vector" in name:
        raise AdapterUnfit(name, f"is of DoRA, which is not served: {MERGE}")
    raise AdapterUnfit(name, f"is no factor of a module: {MERGE}")


def of_copy(name: str) -> tuple[str, str] | None:
    """Returns the embedding or the head whose own tensor this is, if it is one, and whether that is weight or bias."""
    for end in _COPIES:
        module = name.removesuffix(end).removeprefix(_PREFIX)
        if name.endswith(end) and (is_embedding(module) or is_head(module)):
            return module, end.rpartition(".")[2]
    return None


def is_embedding(name: str) -> bool:
    return name.rpartition(".")[2] in _EMBEDDINGS


def is_head(name: str) -> bool:
    return name in _HEADS


@dataclass(frozen=True, slots=True)
class Spelling:
    """How the adapter's modules begin, and the weights that they are."""

    theirs: str
    ours: str

    @classmethod
    def of(cls, pairs: Iterable[tuple[str, str]]) -> Spelling:
        """Returns the spelling of modules and weights: that of one inside a layer, if there is one."""
        theirs, ours = min(pairs, key=lambda pair: (not any(part.isdigit() for part in pair[0].split(".")), pair))
        first, second = theirs.split("."), ours.split(".")
        while first and second and first[-1] == second[-1]:
            first.pop(), second.pop()
        return cls("".join(f"{part}." for part in first), "".join(f"{part}." for part in second))

    def module(self, weight: str) -> str:
        """Returns the module of a weight."""
        return self.theirs + weight.removeprefix(self.ours) if weight.startswith(self.ours) else weight


def weight_of(module: str, adaptable: Collection[str], tensor: str) -> str:
    """Returns the weight that a module is. Raises AdapterUnfit, which names the tensor."""
    if module in adaptable:
        return module
    for theirs, ours in _OTHER_BEGINNINGS:
        if module.startswith(theirs) and ours + module.removeprefix(theirs) in adaptable:
            return ours + module.removeprefix(theirs)
    bare = [name for name in adaptable if name.endswith(f".{module}") and name.count(".") == module.count(".") + 1]
    if len(bare) == 1:
        return bare[0]
    raise AdapterUnfit(tensor, f"{_why_not(module)}: {MERGE}")


def _why_not(module: str) -> str:
    if ".experts" in module:
        return "experts take no adapter here"
    if module.endswith("kv_b_proj"):
        return "the projection of latents to keys and values takes no adapter here"
    if any(part in module for part in ("vision", "visual", "audio", "multi_modal_projector")):
        return "only the text half of this model is served"
    return "the model has no such weight that takes an adapter"
