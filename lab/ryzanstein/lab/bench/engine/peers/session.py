"""One comparison from beginning to end: the contenders, their settings, and the report."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from ryzanstein.lab.bench.engine.engine import Workload
from ryzanstein.lab.bench.engine.peers.comparison import PeerComparison
from ryzanstein.lab.bench.engine.peers.contenders import Contender, OwnContender, Site, present_peers
from ryzanstein.lab.bench.engine.peers.footprint import footprints, spec_of_model
from ryzanstein.lab.bench.engine.peers.machine import PeerMachine
from ryzanstein.lab.bench.engine.peers.report import PeerReport
from ryzanstein.lab.bench.engine.peers.runners.protocol import Settings
from ryzanstein.worker.ranks.messages import RankSpec

_FLOAT32_BYTES = 4
_SPARE_TOKENS = 16  # room that some peers need beyond prompt and answer


def peer_settings(model: Path, workload: Workload, threads: int) -> Settings:
    """Returns a peer's settings except for its own model, quantization and ranks.

    Raises MODEL_INVALID for a model that we do not serve.
    """
    spec = spec_of_model(model)
    max_tokens = workload.num_tokens + _SPARE_TOKENS
    token_bytes = 2 * len(spec.layers) * spec.num_kv_heads * spec.head_dim * _FLOAT32_BYTES
    return Settings(
        model=str(model),
        quantization="none",
        tp=1,
        threads=threads,
        cores=sorted(os.sched_getaffinity(0))[:threads],
        max_batch=max(workload.batches),
        max_tokens=min(max_tokens, spec.context_length),
        cache_bytes=max(load.batch * (load.num_tokens + _SPARE_TOKENS) for load in workload.loads) * token_bytes,
    )


def compare(specs: Sequence[RankSpec], site: Site, workload: Workload, vocab_size: int, people: Console) -> PeerReport:
    """Compares our configurations and the installed peers, round by round."""
    peers, absent = present_peers(site)
    for label, why in absent.items():
        people.print(f"absent: {label}: {why}", markup=False)
    contenders: list[Contender] = [*(OwnContender(spec, vocab_size) for spec in specs), *peers]
    known = footprints(specs, site)
    threads = site.settings.threads
    outcome = asyncio.run(PeerComparison(contenders, workload, threads, vocab_size, people).run())
    return PeerReport(str(site.model), PeerMachine.read(), workload, threads, outcome, absent, known)
