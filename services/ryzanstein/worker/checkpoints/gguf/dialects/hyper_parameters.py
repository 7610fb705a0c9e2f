"""Hyper-parameters: the metadata of a GGUF file as config.json, and back.

What a file does not say is what llama.cpp assumes for the architecture. A model that differs from
it cannot be written: `metadata_of` reads back what it says and compares the decoders.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from ryzanstein.worker.architectures.registry import ARCHITECTURES, spec_of, values_of
from ryzanstein.worker.architectures.spec import DecoderSpec
from ryzanstein.worker.checkpoints.gguf.dialects.dialect import Dialect
from ryzanstein.worker.checkpoints.gguf.dialects.metadata import FURTHER, GgufFacts, MetadataReader
from ryzanstein.worker.checkpoints.gguf.header import Value
from ryzanstein.worker.refusal import CheckpointError, excerpt

_EMBEDDING, _HEAD = "token_embd.weight", "output.weight"
_CONTEXT = "max_position_embeddings"


def config_of(facts: GgufFacts, dialect: Dialect) -> dict[str, Any]:
    """Returns the config.json of a file's decoder. Raises CheckpointError, which names the key."""
    reader = MetadataReader(facts, dialect.name)
    config = _common(reader, dialect)
    config |= dialect.heads.read(reader, config)
    config |= {key: _scalar(reader, dialect, key) for key in dialect.scalars}
    config |= {flag: reader.has_tensor(tensor) for flag, tensor in dialect.present.items()}
    config |= {flag: not reader.has_tensor(tensor) for flag, tensor in dialect.absent.items()}
    config |= dialect.fixed
    for feature in dialect.features:
        config |= feature.read(reader, config)
    return _renamed(reader, dialect, config)


def metadata_of(config: Mapping[str, Any], facts: GgufFacts, dialect: Dialect) -> dict[str, Value]:
    """Returns a file's metadata for the decoder of config.json; `facts` lacks only them.

    Raises CheckpointError for a decoder that differs from what llama.cpp would make of the file.
    """
    spec = spec_of(config)
    metadata = _metadata(spec, config, dialect)
    understood = spec_of(config_of(replace(facts, metadata=metadata), dialect))
    _refuse_differences(facts.file, spec, understood, dialect)
    return metadata


def _common(reader: MetadataReader, dialect: Dialect) -> dict[str, Any]:
    """Returns what every decoder has, under Llama's names."""
    width = reader.count("embedding_length")
    return {
        "architectures": [dialect.class_name],
        "model_type": dialect.model_type,
        "hidden_size": width,
        "num_hidden_layers": _layers(reader, dialect),
        "num_attention_heads": reader.count("attention.head_count"),
        "intermediate_size": 0 if dialect.own_widths else reader.count("feed_forward_length"),
        "vocab_size": _vocabulary(reader.facts, width),
        _CONTEXT: reader.count("context_length"),
        "rms_norm_eps": reader.number(f"attention.{_epsilon(dialect)}"),
        "tie_word_embeddings": _HEAD not in reader.facts.shapes,
    }


def _layers(reader: MetadataReader, dialect: Dialect) -> int:
    """Returns the number of layers, each of which has its tensors: no decoder is described that a file cannot have."""
    count = _further(reader).start
    for layer in range(count):
        name = f"blk.{layer}.{dialect.each_layer}"
        if name not in reader.facts.shapes:
            raise CheckpointError(f"{reader.facts.file}: tensor {excerpt(name)} is missing")
    return count


def further_layers(facts: GgufFacts, dialect: Dialect) -> range:
    """Returns the layers behind a file's decoder, which predict further tokens. Raises CheckpointError."""
    return _further(MetadataReader(facts, dialect.name))


def _further(reader: MetadataReader) -> range:
    count, further = reader.count("block_count"), reader.count(FURTHER, 0)
    if further >= count:
        reader.refuse(FURTHER, f"must be below the number of blocks, got {further}")
    return range(count - further, count)


def _epsilon(dialect: Dialect) -> str:
    return "layer_norm_epsilon" if dialect.layer_norm else "layer_norm_rms_epsilon"


def _vocabulary(facts: GgufFacts, width: int) -> int:
    """Returns the rows of the embedding: a file's other numbers may be those of its tokens."""
    shape = facts.shapes.get(_EMBEDDING)
    if shape is None or len(shape) != 2 or shape[1] != width:
        what = "is missing" if shape is None else f"has shape {list(shape)}"
        raise CheckpointError(f"{facts.file}: tensor {_EMBEDDING} {what}, must be [vocabulary, {width}]")
    return shape[0]


def _scalar(reader: MetadataReader, dialect: Dialect, key: str) -> float | None:
    theirs = dialect.scalars[key]
    return dialect.assumed[key] if key in dialect.assumed and theirs not in reader else reader.number(theirs)


def _renamed(reader: MetadataReader, dialect: Dialect, config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns config.json under the architecture's own names, without keys that it does not have.

    `max_position_embeddings` is there under both names.
    """
    architecture = ARCHITECTURES[dialect.model_type]
    for key, only in architecture.fixed.items():
        if only is not None and config.get(key, only) != only:
            reader.refuse(f"attention.{_epsilon(dialect)}", f"is {excerpt(config[key])}, only {excerpt(only)} is supported")
    known = {key: value for key, value in config.items() if key not in architecture.fixed}
    return {architecture.renamed.get(key, key): value for key, value in known.items()} | {_CONTEXT: config[_CONTEXT]}


def _metadata(spec: DecoderSpec, config: Mapping[str, Any], dialect: Dialect) -> dict[str, Value]:
    """Returns what a file says of a decoder; floats are rounded when they are written."""
    found: dict[str, Value] = {
        "vocab_size": spec.vocab_size,
        "context_length": values_of(config).count(_CONTEXT),
        "embedding_length": spec.hidden_size,
        "block_count": spec.num_layers,
        "feed_forward_length": spec.intermediate_size,
        "attention.head_count": spec.num_heads,
        f"attention.{_epsilon(dialect)}": float(spec.norm.eps),
        **dialect.heads.write(spec, config),
    }
    for key, theirs in dialect.scalars.items():
        value = _number_of(spec, key)
        if value is not None:
            found[theirs] = float(value)
    for feature in dialect.features:
        found |= feature.write(spec, config)
    return {f"{dialect.name}.{key}": value for key, value in found.items()}


def _number_of(spec: DecoderSpec, key: str) -> float | None:
    """Returns a decoder's number under config.json's name for it."""
    return {
        "attn_logit_softcapping": spec.score_cap,
        "final_logit_softcapping": spec.logit_cap,
        "attention_multiplier": spec.layers[0].attention_scale,
        "embedding_multiplier": spec.embedding_scale,
        "residual_multiplier": spec.residual_scale,
        "logits_scaling": 1 / spec.logit_scale,
        "logit_scale": spec.logit_scale,
        "clip_qkv": spec.qkv_clip,
    }[key]


def _refuse_differences(file: str, meant: DecoderSpec, understood: DecoderSpec, dialect: Dialect) -> None:
    ours, theirs = _comparable(meant), _comparable(understood)
    for key, value in ours.items():
        if theirs[key] != value:
            both = f"{dialect.name} in GGUF means {excerpt(theirs[key])}, the model has {excerpt(value)}"
            raise CheckpointError(f"{file}: {key} cannot be written: {both}")


def _comparable(spec: DecoderSpec) -> dict[str, Any]:
    """Returns a decoder's numbers as a file can have them: floats rounded, windows that never end left out."""
    layers = tuple(
        replace(layer, window=None if layer.window is not None and layer.window >= spec.context_length else layer.window)
        for layer in spec.layers
    )
    plain = {key: value for key, value in asdict(replace(spec, layers=layers)).items() if key not in ("names", "model_type")}
    rounded: dict[str, Any] = _rounded(plain)
    return rounded


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(np.float32(value))
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(each) for each in value]
    return value
