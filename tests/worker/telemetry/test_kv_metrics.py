"""The KV cache in bytes, over all ranks."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from ryzanstein.worker.engine.messages import HotStats, StateStats
from ryzanstein.worker.supervision.messages import RankReady
from ryzanstein.worker.telemetry import NO_STATS, WorkerTelemetry


@dataclass
class Shown:
    telemetry: WorkerTelemetry

    def bytes_of(self, kind: str) -> float | None:
        return self.telemetry.registry.get_sample_value("ryzanstein_worker_kv_bytes", {"kind": kind})


def test_what_is_held_cached_and_free_adds_up_to_the_limit() -> None:
    shown = Shown(WorkerTelemetry())
    ranks = [RankReady(rank, 64, 10, 16, 4, {}, block_bytes=100, hot_page_bytes=1000) for rank in range(2)]
    shown.telemetry.ranks_ready(ranks)
    stats = msgspec.structs.replace(NO_STATS, blocks_held=3, blocks_cached=2, block_limit=10, hot=HotStats(held=4, cached=1))
    shown.telemetry.engine(stats)
    assert (shown.bytes_of("held"), shown.bytes_of("cached"), shown.bytes_of("free")) == (600, 400, 1000)
    assert (shown.bytes_of("hot_held"), shown.bytes_of("hot_cached")) == (4000, 1000)


def test_slots_for_states_are_shown_in_bytes_and_what_was_found_without_one_is_counted() -> None:
    shown = Shown(WorkerTelemetry())
    shown.telemetry.ranks_ready([RankReady(rank, 64, 10, 16, 4, {}, num_states=12, state_bytes=50 + rank) for rank in range(2)])
    stats = msgspec.structs.replace(NO_STATS, states=StateStats(held=4, cached=3, evicted=2), without_state=96)
    shown.telemetry.engine(stats)
    shown.telemetry.count(stats, NO_STATS)
    assert (shown.bytes_of("states_held"), shown.bytes_of("states_cached")) == (404, 303)
    value = shown.telemetry.registry.get_sample_value
    assert value("ryzanstein_worker_prefix_without_state_tokens_total") == 96
    assert value("ryzanstein_worker_kv_blocks_evicted_total", {"kind": "state"}) == 2
