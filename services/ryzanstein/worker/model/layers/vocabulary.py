"""The two ends of a decoder, split over the vocabulary: token ids to vectors, vectors to logits.

A vocabulary that does not divide over the ranks is padded: the last shard has rows of zeros that no
token refers to, and their logits are cut off.

Legend: T tokens, S sampled rows, E hidden size, V vocabulary, W width of this rank's shard.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from ryzanstein.worker.architectures.spec import DecoderSpec
from ryzanstein.worker.collectives.parallel import TensorParallel
from ryzanstein.worker.model.layers.linear import Rows, open_site
from ryzanstein.worker.model.layers.source import WeightSource
from ryzanstein.worker.model.layers.stored import StoredWeight
from ryzanstein.worker.model.program.ends import emit_adapted_rows, emit_greatest, emit_logits, emit_rows
from ryzanstein.worker.model.program.ops import Ops, RowNorm
from ryzanstein.worker.products import Product
from ryzanstein.worker.products.adapted import AdaptableWeight, AdapterRows
from ryzanstein.worker.products.blocks import PackedBlocks
from ryzanstein.worker.products.int8 import Int8Table
from ryzanstein.worker.products.native import NativeStack, NativeWeight, native_weights
from ryzanstein.worker.sampling.sampler import new_likeliest

Best = tuple[list[float], list[int]]
"""The greatest logit of each row, and its token id."""


class VocabularyShard:
    """This rank's rows of a [V, E] matrix: `num_valid` rows are tokens, the rest are padding.

    `tied`: it is both an embedding and a head.
    """

    def __init__(
        self, source: WeightSource, tp: TensorParallel, name: str, vocab_size: int, hidden_size: int, *, tied: bool = False
    ) -> None:
        self.name, self.shape = name, (vocab_size, hidden_size)
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

    def native(self) -> NativeWeight:
        """Returns what a program looks rows up in. Raises NotNative."""
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

    def native(self) -> NativeWeight:
        num_rows, width = self._weight_WE.shape
        return NativeWeight("unpacked", self._weight_WE, (num_rows, width), None)


class _PackedTable:
    """A table of 8 bits or less, of which rows are unpacked when they are looked up."""

    def __init__(self, packed: PackedBlocks | Int8Table) -> None:
        self._packed = packed
        self.lookup = packed.lookup
        self.dtype, self.device = torch.float32, packed.device

    def product(self, source: WeightSource, bias_W: Tensor | None, *, kept: bool) -> Product:
        return self._packed.product(bias_W)

    def native(self) -> NativeWeight:
        (weight,) = self._packed.product(None).native()
        return weight


class VocabParallelEmbedding:
    """An embedding: each rank looks up the tokens of its shard, and an all-reduce combines them."""

    def __init__(self, source: WeightSource, shard: VocabularyShard, tp: TensorParallel) -> None:
        self._shard, self._tp = shard, tp
        own = (min(shard.first, shard.shape[0]), shard.num_valid)
        self._site = source.adapters.open([AdaptableWeight(shard.name, *shard.shape, own)], [(0, 0, shard.shape[1], 0)])

    def __call__(self, ids_T: Tensor, rows: AdapterRows | None = None) -> Tensor:
        """Returns the rows of tokens. `rows`: those that have an adapter."""
        if self._tp.size == 1:
            x_TE = self._shard.table.lookup(ids_T)
            if rows is not None:
                self._site.add_rows(ids_T, x_TE, rows)
            return x_TE
        local_T = ids_T - self._shard.first
        absent_T = (local_T < 0) | (local_T >= self._shard.num_valid)
        x_TE = self._shard.table.lookup(local_T.masked_fill_(absent_T, 0))
        x_TE.masked_fill_(absent_T.unsqueeze(1), 0)
        if rows is not None:
            self._site.add_rows(local_T.masked_fill_(absent_T, -1), x_TE, rows)
        return self._tp.collectives.all_reduce(x_TE)

    def emit(self, ops: Ops, out: int) -> None:
        """Adds its ops. Raises NotNative."""
        shard = self._shard
        emit_rows(ops, shard.table.native(), out, first=shard.first, num_valid=shard.num_valid)
        if ops.adapting:
            emit_adapted_rows(ops, self._site.address, out, width=shard.shape[1], ids=(shard.first, shard.num_valid))
        ops.all_reduced(out)


class VocabParallelHead:
    """A head whose logits are gathered on rank 0, all of them or only what an argmax needs."""

    def __init__(self, source: WeightSource, shard: VocabularyShard, tp: TensorParallel, spec: DecoderSpec) -> None:
        self._first, self._num_valid, self._tp, self._vocab_size = shard.first, shard.num_valid, tp, spec.vocab_size
        self._scale, self._cap, self._device = spec.logit_scale, spec.logit_cap, shard.table.device
        bias_W = source.new(shard.width) if spec.head_bias else None
        if bias_W is not None:
            source.read(f"{spec.names.head}.bias", (spec.vocab_size,), bias_W, start=shard.first)
        self._likeliest = new_likeliest(source.kernels)
        self._product = shard.table.product(source, bias_W, kept=spec.tied_head)
        rows = Rows(spec.names.head, spec.vocab_size, ((min(shard.first, spec.vocab_size), shard.num_valid),))
        self._site = open_site(source, spec.hidden_size, [rows])

    def logits(self, x_SE: Tensor, rows: AdapterRows | None = None) -> Tensor | None:
        """Returns all logits [S, V] in float32 on rank 0, None elsewhere. `rows`: those that have an adapter."""
        return self.gathered(self._local(x_SE, rows))

    def greedy(self, x_SE: Tensor, rows: AdapterRows | None = None) -> Best | None:
        """Returns each row's greatest logit and its token id on rank 0, None elsewhere.

        Among equal logits the lowest id wins.
        """
        return self.likeliest(self._local(x_SE, rows))

    def emit(self, ops: Ops, source: int, norm: RowNorm) -> None:
        """Adds the product with the wanted rows of a buffer, and then, if it has ops, the choice of the greatest logit.

        Raises NotNative.
        """
        stack = NativeStack(native_weights(self._product), self._site.address)
        emit_logits(ops, stack, source, norm, factor=self._scale)
        ops.end_goal()
        if self._cap is None and self._num_valid:
            emit_greatest(ops, self._num_valid)
            ops.end_goal()

    def gathered(self, local_SW: Tensor) -> Tensor | None:
        """Returns all logits, as `logits`, of those of this rank's shard."""
        gathered = self._tp.collectives.gather_to_root(local_SW.float())
        return None if gathered is None else gathered[:, : self._vocab_size]

    def likeliest(self, local_SW: Tensor) -> Best | None:
        """Returns what `greedy` does, of the logits of this rank's shard."""
        if not self._num_valid:
            return self.merged([-math.inf] * len(local_SW), [-self._first] * len(local_SW))
        best_S, index_S = self._likeliest(local_SW[:, : self._num_valid])
        return self.merged(best_S.tolist(), index_S.tolist())

    def merged(self, best: list[float], index: list[int]) -> Best | None:
        """Returns what `greedy` does, of each row's greatest logit of this rank's shard and its place there.

        Ranks exchange one (logit, id) pair per row: float64 holds both exactly.
        """
        if self._tp.size == 1:
            return best, index
        pairs = [best, [place + self._first for place in index]]
        best_S2 = torch.tensor(pairs, dtype=torch.float64, device=self._device).t().contiguous()
        gathered = self._tp.collectives.gather_to_root(best_S2)
        if gathered is None:
            return None
        pairs_SR2 = gathered.view(len(best), self._tp.size, 2)
        best_S, rank_S = pairs_SR2[:, :, 0].max(dim=1)
        ids_S = pairs_SR2[:, :, 1].gather(1, rank_S.unsqueeze(1)).squeeze(1)
        return best_S.tolist(), ids_S.long().tolist()

    def capped(self, local_SW: Tensor) -> Tensor:
        """Returns the logits with the cap, in place. Greedy sampling needs it too: it can make large logits equal."""
        return local_SW if self._cap is None else local_SW.div_(self._cap).tanh_().mul_(self._cap)

    def _local(self, x_SE: Tensor, rows: AdapterRows | None) -> Tensor:
        """Returns the logits of this rank's shard, with scale and cap."""
        local_SW = self._product(x_SE)
        if rows is not None:
            self._site.add(x_SE, local_SW, rows)
        return self.capped(local_SW if self._scale == 1 else local_SW.mul_(self._scale))
