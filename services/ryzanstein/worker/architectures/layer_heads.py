"""What layers of Gemma 4 have of their own: heads, keys of another layer, and inputs beside the hidden states."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HeadsSpec:
    """A layer's own numbers of heads, where layers differ.

    Its keys and values take `planes` planes of a block: with two, keys are in the first and values in the second.
    `values_are_keys`: values are what keys are made of, before that is normed and rotated. With `shared_with`
    there are queries alone, which read the keys and values of that layer.
    """

    num_kv_heads: int
    head_dim: int
    planes: int = 1
    values_are_keys: bool = False
    shared_with: int | None = None


@dataclass(frozen=True, slots=True)
class PerLayerSpec:
    """Inputs of each layer, of `width` numbers, from a table with a row for each of `vocab_size` tokens (Gemma 3n, 2025).

    A layer's input is a row's part plus a normed projection of the embedding. It is gated by the hidden states,
    projected, normed and added to them.
    """

    width: int
    vocab_size: int


@dataclass(frozen=True, slots=True)
class PerLayerNames:
    """The names of the table, of the projection of embeddings and its norm; and within a layer of gate, projection and norm."""

    table: str
    projection: str
    projection_norm: str
    gate: str
    out: str
    norm: str


@dataclass(frozen=True, slots=True)
class BesideNames:
    """The names of experts beside an MLP: norms of the MLP's output, and of the experts' input and output.

    `input_scale` scales the router's input, which is normed without a weight, `expert_scale` each expert's weight.
    """

    mlp_norm: str
    experts_in_norm: str
    experts_out_norm: str
    input_scale: str
    expert_scale: str
