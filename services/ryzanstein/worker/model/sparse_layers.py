"""Which layers of a decoder follow the node's rule of sparse attention, and what it does not combine with."""

from __future__ import annotations

from dataclasses import replace

from ryzanstein.worker.architectures.spec import DecoderSpec, LayerSpec
from ryzanstein.worker.refusal import ModelRefused
from ryzanstein.worker.settings.quantization import KvCompression
from ryzanstein.worker.settings.sparse import SparseAttention, parse_sparse_attention


def sparsified(spec: DecoderSpec, setting: str) -> DecoderSpec:
    """Returns the decoder with the rule in its layers. Raises ModelRefused."""
    sparse = parse_sparse_attention(setting)
    if sparse is None:
        return spec
    if spec.latent is not None:
        raise ModelRefused("sparse_attention: models with latents are not supported")
    if spec.alibi is not None:
        raise ModelRefused("sparse_attention: models with linear biases (ALiBi) are not supported")
    if spec.has_own_heads:
        raise ModelRefused("sparse_attention: models whose layers have heads of their own are not supported")
    chosen = _chosen(spec, sparse)
    layers = (replace(layer, sparse=sparse.rule) if i in chosen else layer for i, layer in enumerate(spec.layers))
    return replace(spec, layers=tuple(layers))


def refuse_unfit(setting: str, compression: KvCompression, without_kernels: str) -> None:
    """Raises ModelRefused if the rule does not combine with another setting, or with this machine."""
    if parse_sparse_attention(setting) is None:
        return
    if compression != "none":
        raise ModelRefused(f"sparse_attention does not combine with kv_compression {compression}: unset one of them")
    if without_kernels:
        raise ModelRefused(f"sparse_attention needs our own kernels: {without_kernels}")


def _chosen(spec: DecoderSpec, sparse: SparseAttention) -> frozenset[int]:
    for index in sparse.layers:
        if index >= spec.num_layers:
            raise ModelRefused(f"sparse_attention: there is no layer {index}, the model has {spec.num_layers}")
        if not spec.layers[index].attention:
            kept = "keeps a state, and no keys" if spec.layers[index].state is not None else "keeps no keys"
            raise ModelRefused(f"sparse_attention: layer {index} {kept} that a rule could leave out")
        if not _reads_all(spec, spec.layers[index]):
            raise ModelRefused(f"sparse_attention: layer {index} has a window of its own: {spec.layers[index].window} tokens")
    chosen = sparse.layers or [i for i, layer in enumerate(spec.layers) if _reads_all(spec, layer)]
    if not chosen:
        raise ModelRefused("sparse_attention: every layer of the model has a window of its own")
    return frozenset(chosen)


def _reads_all(spec: DecoderSpec, layer: LayerSpec) -> bool:
    return layer.attention and (layer.window is None or layer.window >= spec.context_length)
