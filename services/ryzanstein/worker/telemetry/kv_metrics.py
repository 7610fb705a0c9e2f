"""The metrics of the KV cache: its blocks, who has its memory, how pages are kept, sealed and evicted."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge

from ryzanstein.worker.engine.messages import EngineStats, HotStats, StateStats
from ryzanstein.worker.settings.quantization import KV_COMPRESSIONS
from ryzanstein.worker.supervision.messages import RankReady


class KvMetrics:
    """The metrics of the KV cache of one model."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"ryzanstein_worker_{name}", text, labels, registry=registry)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"ryzanstein_worker_{name}", text, labels, registry=registry)

        self._held = gauge("kv_blocks_held", "KV blocks held by running sequences.")
        self._cached = gauge("kv_blocks_cached", "Idle KV blocks kept in the prefix cache.")
        self._blocks = gauge("kv_blocks", "KV blocks of the model's own.")
        self._limit = gauge("kv_blocks_limit", "KV blocks that the engine may use, with what is lent and borrowed.")
        self._borrowed = gauge("kv_bytes_borrowed", "KV memory that the model has from others of the node.")
        self._lent = gauge("kv_bytes_lent", "KV memory of the model's own that others of the node have.")
        self._bytes = gauge("kv_bytes", "Memory of the KV cache of all ranks, by what it is used for.", "kind")
        self._takebacks = counter("kv_takebacks_total", "Times that KV blocks in use had to be given back.")
        self._evicted = counter("kv_blocks_evicted_total", "Idle KV blocks given up.", "kind")
        self._sealed = counter("kv_pages_sealed_total", "Pages of keys and values compressed.")
        self._hot_held = gauge("kv_hot_pages_held", "Pages in full precision that sequences hold.")
        self._hot_cached = gauge("kv_hot_pages_cached", "Idle pages in full precision, to resume from.")
        self._states_held = gauge("kv_states_held", "Slots for states that sequences hold.")
        self._states_cached = gauge("kv_states_cached", "Idle states, to resume from.")
        self._without_state = counter("prefix_without_state_tokens_total", "Prompt tokens with cached keys, but no state.")
        self._sparse = gauge("sparse_attention", "1 for the rule of sparse attention.", "rule")
        self._compression = gauge("kv_compression", "1 for how older keys and values are kept.", "kind")

        self._block_bytes = self._hot_page_bytes = self._state_bytes = 0

    def ready(self, ranks: Sequence[RankReady]) -> None:
        """Shows what ranks that are ready said of their cache."""
        lead = ranks[0]
        self._block_bytes, self._hot_page_bytes = sum(rank.block_bytes for rank in ranks), lead.hot_page_bytes
        self._state_bytes = sum(rank.state_bytes for rank in ranks)
        self._blocks.set(lead.num_blocks)
        self._set_compression(lead.kv_compression)
        self._set_sparse(lead.sparse_attention)

    def _set_sparse(self, rule: str) -> None:
        """Shows the rule of sparse attention that is in force; empty: there is none."""
        self._sparse.clear()
        if rule:
            self._sparse.labels(rule).set(1)

    def _set_compression(self, kept: str) -> None:
        for kind in KV_COMPRESSIONS:
            self._compression.labels(kind).set(kind == kept)

    def show(self, stats: EngineStats) -> None:
        """Shows what an engine reports of this moment."""
        hot, states = stats.hot or HotStats(), stats.states or StateStats()
        self._held.set(stats.blocks_held)
        self._cached.set(stats.blocks_cached)
        self._limit.set(stats.block_limit)
        self._hot_held.set(hot.held)
        self._hot_cached.set(hot.cached)
        self._states_held.set(states.held)
        self._states_cached.set(states.cached)
        free = max(0, stats.block_limit - stats.blocks_held - stats.blocks_cached)
        for kind, blocks in (("held", stats.blocks_held), ("cached", stats.blocks_cached), ("free", free)):
            self._bytes.labels(kind).set(blocks * self._block_bytes)
        for kind, pages in (("hot_held", hot.held), ("hot_cached", hot.cached)):
            self._bytes.labels(kind).set(pages * self._hot_page_bytes)
        for kind, slots in (("states_held", states.held), ("states_cached", states.cached)):
            self._bytes.labels(kind).set(slots * self._state_bytes)

    def lending(self, borrowed_bytes: int, lent_bytes: int) -> None:
        self._borrowed.set(borrowed_bytes)
        self._lent.set(lent_bytes)

    def count(self, stats: EngineStats, old: EngineStats) -> None:
        """Adds what an engine counted since its `old` statistics."""
        hot, before = stats.hot or HotStats(), old.hot or HotStats()
        states, states_before = stats.states or StateStats(), old.states or StateStats()
        self._takebacks.inc(stats.takebacks - old.takebacks)
        self._evicted.labels("block").inc(stats.blocks_evicted - old.blocks_evicted)
        self._evicted.labels("hot").inc(hot.evicted - before.evicted)
        self._evicted.labels("state").inc(states.evicted - states_before.evicted)
        self._without_state.inc(stats.without_state - old.without_state)
        self._sealed.inc(hot.sealed - before.sealed)
