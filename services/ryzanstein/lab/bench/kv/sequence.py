"""One sequence of a model whose keys and values are kept in one of the compared ways.

The decoder and its weights are shared by all of them; each has a cache of its own. A hot page is
reused as soon as no later query sees it hot.

Legend: T tokens, N slots, C columns of a slot, B cold blocks, X bytes of a block, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ryzanstein.lab.bench.kv.options import KvOption
from ryzanstein.worker.model.architectures.spec import DecoderSpec
from ryzanstein.worker.model.attention import FullPages, LayerPages, Paged
from ryzanstein.worker.model.cold_layout import PAGE_TOKENS, ColdLayout, sees_cold
from ryzanstein.worker.model.decoder import Decoder
from ryzanstein.worker.model.inputs import GroupInputs, StepInputs
from ryzanstein.worker.model.kernels.native import ColdKeys, NativeKernels, PagedKeys
from ryzanstein.worker.model.layer_groups import LayerGroups


@dataclass(frozen=True, slots=True)
class SharedModel:
    """A decoder, its description, and our own kernels."""

    decoder: Decoder
    spec: DecoderSpec
    kernels: NativeKernels

    @classmethod
    def of(cls, decoder: Decoder, spec: DecoderSpec, kernels: NativeKernels) -> SharedModel:
        """Each layer becomes a group of its own: ways differ by layer."""
        layers = tuple(range(spec.num_layers))
        decoder.groups = LayerGroups(tuple(layer.window for layer in spec.layers), spec.num_layers, layers, layers)
        return cls(decoder, spec, kernels)


class KvSequence:
    """A sequence of at most `max_tokens` tokens, fed at most `at_once` at a time."""

    def __init__(self, model: SharedModel, option: KvOption, max_tokens: int, at_once: int) -> None:
        self.option, self._model, self._num_read = option, model, 0
        spec = model.spec
        self._compression = option.compression(spec.num_layers)
        pages, width = -(-max_tokens // PAGE_TOKENS), 2 * spec.num_kv_heads * spec.head_dim
        self._num_hot, self._layout, num_blocks = 0, None, 0
        if self._compression is not None:
            self._num_hot = -(-(at_once + self._compression.hot_tokens) // PAGE_TOKENS) + 3
            self._layout, num_blocks = ColdLayout(self._compression.kind, spec.num_kv_heads, spec.head_dim), pages
        self._table_1B = torch.arange(pages).unsqueeze(0)
        self._pages: list[LayerPages] = []
        for layer in range(spec.num_layers):
            if self._is_cold(layer) and self._layout is not None:
                hot_NC = torch.zeros(self._num_hot * PAGE_TOKENS, width, dtype=option.dtype)
                self._pages.append(LayerPages(hot_NC, torch.zeros(num_blocks, self._layout.block_bytes, dtype=torch.uint8)))
            else:
                self._pages.append(LayerPages(torch.zeros(pages * PAGE_TOKENS, width, dtype=option.dtype)))

    def pages(self, layer: int, plane: int) -> LayerPages:
        """The cache's side, for the decoder."""
        return self._pages[layer]

    @property
    def nbytes(self) -> int:
        """The size of all keys and values, hot pages included."""
        parts = [part for page in self._pages for part in (page.slots_NC, page.cold_BX)]
        return sum(part.nbytes for part in parts if part is not None)

    def restart(self) -> None:
        self._num_read = 0

    @torch.inference_mode()
    def feed(self, token_ids: Sequence[int], rows: Sequence[int] | None = None) -> Tensor:
        """Appends tokens. Returns the logits after those of `rows`, or after the last one, [R, V], float32."""
        last_R = torch.tensor([len(token_ids) - 1] if rows is None else rows, dtype=torch.int64)
        hidden_RE = self._model.decoder.hidden(self._inputs(token_ids, last_R), self)
        self._num_read += len(token_ids)
        if len(last_R) == 0:
            return hidden_RE.new_zeros(0, self._model.spec.vocab_size)
        logits_RV = self._model.decoder.head.logits(hidden_RE)
        assert logits_RV is not None, "the only rank is rank 0"
        return logits_RV

    def _is_cold(self, layer: int) -> bool:
        return self._compression is not None and layer >= self._compression.first_layer

    def _inputs(self, token_ids: Sequence[int], last_R: Tensor) -> StepInputs:
        positions_T = torch.arange(self._num_read, self._num_read + len(token_ids))
        found: dict[tuple[int | None, bool], GroupInputs] = {}
        for layer, spec in enumerate(self._model.spec.layers):
            place = spec.window, self._is_cold(layer)
            if place not in found:
                found[place] = self._cold(spec.window, positions_T) if place[1] else self._full(spec.window, positions_T)
        groups = [found[spec.window, self._is_cold(layer)] for layer, spec in enumerate(self._model.spec.layers)]
        return StepInputs(torch.tensor(token_ids, dtype=torch.int64), positions_T, last_R, groups)

    def _full(self, window: int | None, positions_T: Tensor) -> GroupInputs:
        return GroupInputs(positions_T, [Paged(self._model.kernels, self._keys(window, positions_T, self._table_1B))])

    def _cold(self, window: int | None, positions_T: Tensor) -> GroupInputs:
        assert self._compression is not None
        assert self._layout is not None
        begin, end = int(positions_T[0]), int(positions_T[-1]) + 1
        first = sees_cold(begin, self._compression.hot_tokens)
        hot_1B = torch.arange(first, -(-end // PAGE_TOKENS) + 1).unsqueeze(0) % self._num_hot
        cold = ColdKeys(self._table_1B, self._layout, self._compression.hot_tokens)
        keys = self._keys(window, positions_T, hot_1B, torch.tensor([first]), cold)
        full_M = torch.arange(begin // PAGE_TOKENS, end // PAGE_TOKENS)
        full = FullPages(full_M % self._num_hot, full_M, self._layout) if len(full_M) else None
        slots_T = positions_T // PAGE_TOKENS % self._num_hot * PAGE_TOKENS + positions_T % PAGE_TOKENS
        return GroupInputs(slots_T, [Paged(self._model.kernels, keys)], full)

    @staticmethod
    def _keys(
        window: int | None, positions_T: Tensor, table_1B: Tensor, first_S: Tensor | None = None, cold: ColdKeys | None = None
    ) -> PagedKeys:
        num_new, length = torch.tensor([len(positions_T)]), positions_T[-1:] + 1
        return PagedKeys(torch.tensor([0]), num_new, table_1B, length, PAGE_TOKENS, window, first_S=first_S, cold=cold)
