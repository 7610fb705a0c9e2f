"""Turns token ids into the first layer's input: vectors with scale, learned positions and norm.

Legend: T tokens, E hidden size, P positions.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ryzanstein.worker.architectures.spec import DecoderSpec
from ryzanstein.worker.collectives.parallel import TensorParallel
from ryzanstein.worker.model.layers.norm import optional_norm, row_norm
from ryzanstein.worker.model.layers.source import WeightSource
from ryzanstein.worker.model.layers.vocabulary import VocabParallelEmbedding, VocabularyShard
from ryzanstein.worker.model.program.ops import NotNative, Ops
from ryzanstein.worker.products.adapted import AdapterRows


class Embedding:
    """The input of the first layer, the same on every rank."""

    def __init__(self, source: WeightSource, shard: VocabularyShard, tp: TensorParallel, spec: DecoderSpec) -> None:
        self._lookup = VocabParallelEmbedding(source, shard, tp)
        # Gemma rounds the root of the width to the model's dtype.
        self._scale = torch.tensor(spec.embedding_scale, dtype=shard.table.dtype).item()
        self._norm = optional_norm(source, "", spec.names.embedding_norm, spec.hidden_size, spec.norm)
        self._offset, self._position_PE = spec.position_offset, None
        if spec.names.position is not None:
            shape = (spec.context_length + spec.position_offset, spec.hidden_size)
            self._position_PE = source.new(*shape)
            source.read(f"{spec.names.position}.weight", shape, self._position_PE)

    def __call__(self, ids_T: Tensor, positions_T: Tensor, rows: AdapterRows | None = None) -> Tensor:
        x_TE = self._lookup(ids_T, rows)
        if self._scale != 1:
            x_TE.mul_(self._scale)
        if self._position_PE is not None:
            x_TE.add_(F.embedding(positions_T + self._offset, self._position_PE))
        return self._norm(x_TE)

    def emit(self, ops: Ops, out: int) -> None:
        """Adds its ops. Raises NotNative."""
        norm = row_norm(self._norm)
        if self._position_PE is not None:
            raise NotNative("learned positions")
        self._lookup.emit(ops, out)
        if self._scale != 1:
            ops.rows(out, out, factor=self._scale)
        if norm is not None:
            ops.rows(out, out, norm=norm)
