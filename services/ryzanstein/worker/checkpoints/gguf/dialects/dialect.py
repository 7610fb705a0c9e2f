"""How llama.cpp stores one of our architectures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from ryzanstein.worker.architectures.spec import DecoderSpec
from ryzanstein.worker.checkpoints.gguf.dialects.heads import HeadParameters, WholeHeads
from ryzanstein.worker.checkpoints.gguf.dialects.metadata import MetadataReader
from ryzanstein.worker.checkpoints.gguf.header import Value


class Feature(Protocol):
    """Hyper-parameters that only some dialects have."""

    def read(self, reader: MetadataReader, config: Mapping[str, Any]) -> dict[str, Any]:
        """Returns keys of config.json, under Llama's names; `config` has those of all dialects."""
        ...

    def write(self, spec: DecoderSpec, config: Mapping[str, Any]) -> dict[str, Value]:
        """Returns metadata of the file, without the architecture's name before them."""
        ...


@dataclass(frozen=True, slots=True)
class Dialect:
    """The difference between one of our architectures and llama.cpp's view of it.

    `name` is `general.architecture`, `model_type` that of config.json, `class_name` transformers'
    class. `permuted`: rows of queries and keys are reordered so that pairs of a rotation are
    neighbours. `split_qkv`: queries, keys and values are three tensors in the file, one in a
    checkpoint. `split_gate`: so are gate and up of an MLP. `tiled`: see `tensors.deltas`. `own_widths`:
    something else says how wide the MLP is. `sparse`: models of this `model_type` with
    experts have a name of their own. `plus_one`: norms are stored with one added. `layer_norm`: the key of the norm's
    epsilon is that of layer norms. `fixed` has what config.json needs and the file does not say.
    `scalars` maps keys of config.json to keys of the file that have the same number, `assumed` has
    those numbers where a file may lack them. `present` maps flags of config.json to the tensor
    whose presence they tell, `absent` to that whose absence they tell. `mlp_norm` and `final_norm` are
    names that a few files have for these norms; `each_layer` is a tensor that every layer has.
    """

    name: str
    model_type: str
    class_name: str
    permuted: bool = False
    split_qkv: bool = False
    split_gate: bool = False
    tiled: bool = False
    own_widths: bool = False
    sparse: bool = False
    plus_one: bool = False
    layer_norm: bool = False
    windowed: bool = False
    mlp_norm: str = "ffn_norm"
    final_norm: str = "output_norm"
    each_layer: str = "attn_output.weight"
    scalars: Mapping[str, str] = field(default_factory=dict)
    assumed: Mapping[str, float | None] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    present: Mapping[str, str] = field(default_factory=dict)
    absent: Mapping[str, str] = field(default_factory=dict)
    heads: HeadParameters = field(default_factory=WholeHeads)
    features: tuple[Feature, ...] = ()
