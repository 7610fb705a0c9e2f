"""What a GGUF file says of its model: dialect, hyper-parameters and vocabulary, without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ryzanstein.worker.checkpoints.gguf.dequantize import dequantize
from ryzanstein.worker.checkpoints.gguf.dialects.dialect import Dialect
from ryzanstein.worker.checkpoints.gguf.dialects.hyper_parameters import config_of, further_layers
from ryzanstein.worker.checkpoints.gguf.dialects.metadata import GgufFacts
from ryzanstein.worker.checkpoints.gguf.dialects.table import dialect_of_file
from ryzanstein.worker.checkpoints.gguf.dialects.tensors.names import ROPE_FACTORS
from ryzanstein.worker.checkpoints.gguf.file import GgufFile
from ryzanstein.worker.checkpoints.gguf.tokenizer.vocabulary import GgufVocabulary, vocabulary_of


@dataclass(frozen=True, slots=True)
class GgufDescription:
    """`config` is what config.json of a checkpoint would say.

    Tensors whose names begin with one of `unread` are none of the decoder.
    """

    dialect: Dialect
    config: Mapping[str, Any]
    unread: tuple[str, ...] = ()

    @classmethod
    def of(cls, file: GgufFile) -> GgufDescription:
        """Raises CheckpointError, which names the file and what is wrong or not supported in it."""
        name = str(file.path)
        dialect = dialect_of_file(file.metadata, name)
        shapes = {each.name: each.shape for each in file.tensors.values()}
        stored = file.tensors.get(ROPE_FACTORS)
        factors = None if stored is None else dequantize(stored.blocks, stored.type)
        facts = GgufFacts(name, file.metadata, shapes, factors)
        unread = (ROPE_FACTORS, *(f"blk.{layer}." for layer in further_layers(facts, dialect)))
        return cls(dialect, config_of(facts, dialect), unread)

    def vocabulary(self, file: GgufFile) -> GgufVocabulary:
        """Raises CheckpointError."""
        return vocabulary_of(file.metadata, str(file.path), self.config["vocab_size"])
