"""The two ends of a decoder, split over the vocabulary: token ids to vectors, vectors to logits.

A vocabulary that does not divide over the ranks is padded: the last shard has rows of zeros that no
token refers to, and their logits are cut off.

Legend: T tokens, S sampled rows, E hidden size, V vocabulary, W width of this rank's shard.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from ryzanstein.worker.architectures.spec import DecoderSpec
from ryzanstein.worker.collectives.parallel import TensorParallel
from ryzanstein.worker.model.layers.source import WeightSource
from ryzanstein.worker.model.layers.stored import StoredWeight
from ryzanstein.worker.products import Product
from ryzanstein.worker.products.blocks import PackedBlocks
from ryzanstein.worker.products.int8 import Int8Table
from ryzanstein.worker.sampling.sampler import new_likeliest


class VocabularyShard:
    """This rank's rows of a [V, E] matrix: `num_valid` rows are tokens, the rest are padding.

    `tied`: it is both an embedding and a head.
    """

    def __init__(
        self, source: WeightSource, tp: TensorParallel, name: str, vocab_size: int, hidden_size: int, *, tied: bool = False
    ) -> None:
        self.width = -(-vocab_size // tp.size)
        self.first = tp.rank * self.width
        self.num_valid = max(0, min(self.width, vocab_size - self.first))
        stored = StoredWeight(source, f"{name}.weight", (vocab_size, hidden_size))
        packed = self._packed(source, stored, tied)
        self.table: Table = _FloatTable(source, stored, self) if packed is None else _PackedTable(packed)

    def _packed(self, source: WeightSource, stored: StoredWeight, tied: bool) -> PackedBlocks | Int8Table | None:
        """Returns the rows in a form that can be looked up and multiplied, or None: they are kept as floats."""
        blocks = stored.rows(self.first, self.num_valid).blocks() if self.num_valid else None
        if blocks is not None:
            return source.packed([blocks], self.width)
        if not tied:
            return None
        shape = self.width, stored.stored_shape[1]
        return source.table(shape, lambda first, out_RE: stored.rows(self.first + first, len(out_RE)).fill(out_RE))


class Table(Protocol):
    """The memory of a shard, for an embedding, for a head, or for both."""

    dtype: torch.dtype
    device: torch.device

    def lookup(self, index_T: Tensor) -> Tensor:
        """Returns rows, [T, E]."""
        ...

    def product(self, source: WeightSource, bias_W: Tensor | None, *, kept: bool) -> Product:
        """Returns the product with all rows. `kept`: they are looked up too."""
        ...


class _FloatTable:
    """A table that was read as floats."""

    def __init__(self, source: WeightSource, stored: StoredWeight, shard: VocabularyShard) -> None:
        self._weight_WE = source.new(shard.width, stored.shape[1])
        stored.rows(shard.first, shard.width).fill(self._weight_WE)
        self.dtype, self.device = self._weight_WE.dtype, self._weight_WE.device

    def lookup(self, index_T: Tensor) -> Tensor:
        return F.embedding(index_T, self._weight_WE)

    def product(self, source: WeightSource, bias_W: Tensor | None, *, kept: bool) -> Product:
        return source.product(self._weight_WE, bias_W, kept=kept)


class _PackedTable:
    """A table of 8 bits or less, of which rows are unpacked when they are looked up."""

    def __init__(self, packed: PackedBlocks | Int8Table) -> None:
        self._packed = packed
        self.lookup = packed.lookup
        self.dtype, self.device = torch.float32, packed.device

    def product(self, source: WeightSource, bias_W: Tensor | None, *, kept: bool) -> Product:
        return self._packed.product(bias_W)


class VocabParallelEmbedding:
    """An embedding: each rank looks up the tokens of its shard, and an all-reduce combines them."""

    def __init__(self, shard: VocabularyShard, tp: TensorParallel) -> None:
        self._shard, self._tp = shard, tp

    def __call__(self, ids_T: Tensor) -> Tensor:
        if self._tp.size == 1:
            return self._shard.table.lookup(ids_T)
        local_T = ids_T - self._shard.first
        absent_T = (local_T < 0) | (local_T >= self._shard.num_valid)
        x_TE = self._shard.table.lookup(local_T.masked_fill_(absent_T, 0))
        return self._tp.collectives.all_reduce(x_TE.masked_fill_(absent_T.unsqueeze(1), 0))


class VocabParallelHead:
    """A head whose logits are gathered on rank 0, all of them or only what an argmax needs."""

    def __init__(self, source: WeightSource, shard: VocabularyShard, tp: TensorParallel, spec: DecoderSpec) -> None:
        self._first, self._num_valid, self._tp, self._vocab_size = shard.first, shard.num_valid, tp, spec.vocab_size
        self._scale, self._cap = spec.logit_scale, spec.logit_cap
        bias_W = source.new(shard.width) if spec.head_bias else None
        if bias_W is not None:
            source.read(f"{spec.names.head}.bias", (spec.vocab_size,), bias_W, start=shard.first)
        self._likeliest = new_likeliest(source.kernels)
        self._product = shard.table.product(source, bias_W, kept=spec.tied_head)

    def logits(self, x_SE: Tensor) -> Tensor | None:
        """Returns all logits [S, V] in float32 on rank 0, None elsewhere."""
        local_SW = self._local(x_SE).float()
        gathered = self._tp.collectives.gather_to_root(local_SW)
        return None if gathered is None else gathered[:, : self._vocab_size]

    def greedy(self, x_SE: Tensor) -> tuple[Tensor, Tensor] | None:
        """Returns each row's greatest logit and its token id, [S] each, on rank 0, None elsewhere.

        Among equal logits the lowest id wins. Ranks exchange one (logit, id) pair per row: float64
        holds both exactly.
        """
        local_SW = self._local(x_SE)[:, : self._num_valid]
        if self._tp.size == 1:
            return self._likeliest(local_SW)
        best_S2 = self._best(local_SW)
        gathered = self._tp.collectives.gather_to_root(best_S2)
        if gathered is None:
            return None
        pairs_SR2 = gathered.view(len(x_SE), self._tp.size, 2)
        best_S, rank_S = pairs_SR2[:, :, 0].max(dim=1)
        ids_S = pairs_SR2[:, :, 1].gather(1, rank_S.unsqueeze(1)).squeeze(1)
        return best_S, ids_S.long()

    def _local(self, x_SE: Tensor) -> Tensor:
        """Returns the logits of this rank's shard, with scale and cap.

        Greedy sampling needs both too: a cap can make large logits equal.
        """
        local_SW = self._product(x_SE)
        if self._scale != 1:
            local_SW.mul_(self._scale)
        return local_SW if self._cap is None else local_SW.div_(self._cap).tanh_().mul_(self._cap)

    def _best(self, local_SW: Tensor) -> Tensor:
        if local_SW.shape[1] == 0:
            empty = torch.tensor([-torch.inf, 0.0], dtype=torch.float64, device=local_SW.device)
            return empty.repeat(len(local_SW), 1)
        best_S, index_S = self._likeliest(local_SW)
        return torch.stack([best_S.double(), (index_S + self._first).double()], dim=1)
