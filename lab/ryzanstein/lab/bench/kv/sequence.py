"""One sequence of a model whose keys and values are kept in one of the compared ways.

The decoder and its weights are shared by all of them; each has a cache of its own. A hot page is
reused as soon as no later query sees it hot.

Legend: T tokens, N slots, C columns of a slot, B cold blocks, X bytes of a block, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast, overload

import torch
from torch import Tensor

from ryzanstein.lab.bench.kv.options import KvOption
from ryzanstein.worker.architectures.spec import DecoderSpec
from ryzanstein.worker.cache.kv_cache import KVCache, LayerPages
from ryzanstein.worker.kernels.functions.attention import AttentionFunctions, ColdKeys, PagedKeys, SparseKeys
from ryzanstein.worker.kernels.functions.cold_layout import PAGE_TOKENS, ColdLayout, sees_cold
from ryzanstein.worker.model.attention import Paged
from ryzanstein.worker.model.decoder import Decoder
from ryzanstein.worker.model.inputs.step import Bounding, GroupInputs, Sealing, StepInputs


@dataclass(frozen=True, slots=True)
class SharedModel:
    """A decoder, its description, and our own kernels of attention."""

    decoder: Decoder
    spec: DecoderSpec
    kernels: AttentionFunctions


class KvSequence:
    """A sequence of at most `max_tokens` tokens, fed at most `at_once` at a time."""

    def __init__(self, model: SharedModel, option: KvOption, max_tokens: int, at_once: int) -> None:
        self.option, self._model, self._num_read, self._layer = option, model, 0, 0
        spec = model.spec
        num_pages = -(-max_tokens // PAGE_TOKENS)
        self._num_hot = -(-(at_once + option.hot_tokens) // PAGE_TOKENS) + 3
        self._table_1B = torch.arange(num_pages).unsqueeze(0)
        self._layouts = [option.layout(spec, layer) for layer in range(spec.num_layers)]
        self._pages = [self._new_pages(layout, num_pages) for layout in self._layouts]

    def pages(self, layer: int, plane: int, count: int = 1) -> LayerPages:
        """Returns a layer's pages: the decoder asks for them before it runs the layer."""
        assert count == 1
        self._layer = layer
        return self._pages[layer]

    @property
    def nbytes(self) -> int:
        """The size of all keys and values, hot pages included."""
        parts = [part for pages in self._pages for part in (pages.slots_NC, pages.cold_BX)]
        return sum(part.nbytes for part in parts if part is not None)

    def restart(self) -> None:
        self._num_read = 0

    def rewind(self, num_read: int) -> None:
        """Forgets all but the first tokens. Nothing may be compressed: hot pages are gone."""
        assert not any(self._layouts)
        self._num_read = num_read

    @torch.inference_mode()
    def feed(self, token_ids: Sequence[int], rows: Sequence[int] | None = None) -> Tensor:
        """Appends tokens. Returns the logits after those of `rows`, or after the last one, [R, V], float32."""
        last_R = torch.tensor([len(token_ids) - 1] if rows is None else rows, dtype=torch.int64)
        cache = cast(KVCache, self)
        hidden_RE = self._model.decoder.hidden(self._inputs(token_ids, last_R), cache)
        self._num_read += len(token_ids)
        if len(last_R) == 0:
            return hidden_RE.new_zeros(0, self._model.spec.vocab_size)
        logits_RV = self._model.decoder.head.logits(hidden_RE)
        assert logits_RV is not None, "the only rank is rank 0"
        return logits_RV

    def current(self, inputs: Sequence[GroupInputs]) -> GroupInputs:
        """Returns the inputs of the layer that is run."""
        return inputs[self._layer]

    def _new_pages(self, layout: ColdLayout | None, num_pages: int) -> LayerPages:
        width, dtype = 2 * self._model.spec.num_kv_heads * self._model.spec.head_dim, self.option.dtype
        if layout is None:
            bounds = torch.zeros(num_pages, 2, width // 2) if self.option.rule is not None else None
            return LayerPages(torch.zeros(num_pages * PAGE_TOKENS, width, dtype=dtype), bounds_B2Y=bounds)
        hot_NC = torch.zeros(self._num_hot * PAGE_TOKENS, width, dtype=dtype)
        return LayerPages(hot_NC, torch.zeros(num_pages, layout.block_bytes, dtype=torch.uint8))

    def _inputs(self, token_ids: Sequence[int], last_R: Tensor) -> StepInputs:
        positions_T = torch.arange(self._num_read, self._num_read + len(token_ids))
        found: dict[tuple[int | None, ColdLayout | None], GroupInputs] = {}
        places = [(layer.window, layout) for layer, layout in zip(self._model.spec.layers, self._layouts, strict=True)]
        for window, layout in places:
            if (window, layout) not in found:
                found[window, layout] = self._group(window, layout, positions_T)
        groups = _OfLayer(self, [found[place] for place in places])
        return StepInputs(torch.tensor(token_ids, dtype=torch.int64), positions_T, last_R, groups)

    def _group(self, window: int | None, layout: ColdLayout | None, positions_T: Tensor) -> GroupInputs:
        one, length_S = torch.tensor([len(positions_T)]), positions_T[-1:] + 1
        row_S, kernels = torch.tensor([0]), self._model.kernels
        rule = self.option.rule if window is None or window >= self._model.spec.context_length else None
        if rule is not None and int(length_S) > rule.window:
            sparse = SparseKeys(-(-rule.sinks // PAGE_TOKENS), rule.stride, rule.quest)
            keys = PagedKeys(row_S, one, self._table_1B, length_S, PAGE_TOKENS, rule.window, sparse=sparse)
            return GroupInputs(positions_T, [Paged(kernels, keys)], bounding=self._bounding(positions_T))
        if layout is None:
            bounding = None if rule is None else self._bounding(positions_T)
            return GroupInputs(
                positions_T,
                [Paged(kernels, PagedKeys(row_S, one, self._table_1B, length_S, PAGE_TOKENS, window))],
                bounding=bounding,
            )
        begin, end, hot_tokens = int(positions_T[0]), int(positions_T[-1]) + 1, self.option.hot_tokens
        first = sees_cold(begin, hot_tokens)
        hot_1B = torch.arange(first, end // PAGE_TOKENS + 1).unsqueeze(0) % self._num_hot
        cold = ColdKeys(self._table_1B, layout, hot_tokens)
        keys = PagedKeys(row_S, one, hot_1B, length_S, PAGE_TOKENS, window, first_S=torch.tensor([first]), cold=cold)
        full_M = torch.arange(begin // PAGE_TOKENS, end // PAGE_TOKENS)
        sealing = Sealing(kernels, layout, full_M % self._num_hot, full_M) if len(full_M) else None
        slots_T = positions_T // PAGE_TOKENS % self._num_hot * PAGE_TOKENS + positions_T % PAGE_TOKENS
        return GroupInputs(slots_T, [Paged(kernels, keys)], sealing)

    def _bounding(self, positions_T: Tensor) -> Bounding | None:
        full_M = torch.arange(int(positions_T[0]) // PAGE_TOKENS, (int(positions_T[-1]) + 1) // PAGE_TOKENS)
        return Bounding(full_M, PAGE_TOKENS) if len(full_M) else None


class _OfLayer(Sequence[GroupInputs]):
    """A step's inputs, for a decoder whose layers each have their own: whatever the group, those of the layer."""

    def __init__(self, sequence: KvSequence, inputs: Sequence[GroupInputs]) -> None:
        self._sequence, self._inputs = sequence, inputs

    @overload
    def __getitem__(self, index: int) -> GroupInputs: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[GroupInputs]: ...

    def __getitem__(self, index: int | slice) -> GroupInputs | Sequence[GroupInputs]:
        return self._inputs[index] if isinstance(index, slice) else self._sequence.current(self._inputs)

    def __len__(self) -> int:
        return len(self._inputs)
