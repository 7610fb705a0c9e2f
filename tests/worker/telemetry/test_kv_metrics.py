"""The KV cache in bytes, over all ranks."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from ryzanstein.worker.engine.messages import HotStats
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
