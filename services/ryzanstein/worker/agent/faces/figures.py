"""What a model's engine counted, for those who watch a node without its metrics."""

from __future__ import annotations

from ryzanstein.v1 import worker_pb2 as pb
from ryzanstein.wire.timestamps import duration
from ryzanstein.worker.agent.versions.version import ModelVersion
from ryzanstein.worker.engine.messages import HotStats


def figures_to_wire(version: ModelVersion) -> pb.EngineFigures:
    """Returns what the ranks of this version have counted since they started."""
    stats, (borrowed_bytes, lent_bytes) = version.stats, version.shared_kv_bytes
    hot = stats.hot or HotStats()
    return pb.EngineFigures(
        prefill_tokens=stats.prefill_tokens,
        decode_tokens=stats.decode_tokens,
        prefix_queries=stats.prefix_queries,
        prefix_hits=stats.prefix_hits,
        preemptions=stats.preemptions,
        waiting={priority: now.waiting for priority, now in stats.classes.items()},
        expected_wait=duration(stats.expected_wait_s),
        kv_blocks_cached=stats.blocks_cached,
        hot_pages_held=hot.held,
        hot_pages_cached=hot.cached,
        pages_sealed=hot.sealed,
        kv_bytes_borrowed=borrowed_bytes,
        kv_bytes_lent=lent_bytes,
    )
