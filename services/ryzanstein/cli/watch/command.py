"""Runs a watch: on a screen where there is one, else as lines."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from ryzanstein.cli.programs import require
from ryzanstein.cli.watch.actions import Operator
from ryzanstein.cli.watch.board import WatchBoard
from ryzanstein.cli.watch.plain import PlainWatch, discard_output
from ryzanstein.cli.watch.sampling import ClusterSampler
from ryzanstein.rpc.client import Dialer
from ryzanstein.survey.reach import KeyedRouter


@dataclass(frozen=True, slots=True)
class WatchOptions:
    """How a cluster is watched. `logs` is where `ryzanstein up` writes the logs of a local cluster; None: nobody knows."""

    interval_s: float = 1.0
    read_only: bool = False
    as_json: bool = False
    logs: Path | None = None


def watch(orchestrator: str, router: KeyedRouter, dialer: Dialer, options: WatchOptions) -> None:
    """Watches a cluster until somebody leaves.

    Without a terminal that can be painted, and for JSON, it prints a line for each change.
    """
    if options.as_json or not _paintable():
        try:
            asyncio.run(_print(ClusterSampler(orchestrator, router, dialer, options.interval_s), options))
        except KeyboardInterrupt:
            pass
        except BrokenPipeError:
            discard_output()
    else:
        require("status --watch", "watch")
        asyncio.run(_paint(ClusterSampler(orchestrator, router, dialer, options.interval_s), options))


def _paintable() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"


async def _print(sampler: ClusterSampler, options: WatchOptions) -> None:
    plain = PlainWatch(as_json=options.as_json)
    async for status in sampler.samples():
        plain.take(status, time.time())


async def _paint(sampler: ClusterSampler, options: WatchOptions) -> None:
    from ryzanstein.cli.watch.screen.app import MainScreen, WatchApp, WatchSource

    board = WatchBoard(f"orchestrator {sampler.orchestrator}, router {sampler.router.address}", options.read_only)
    operator = Operator(sampler.orchestrator, sampler.dialer, read_only=options.read_only)
    source = WatchSource(sampler.samples, sampler.pause)
    app = WatchApp(lambda: MainScreen(board, source, operator, sampler.dialer, options.logs))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, app.exit)
    await app.run_async()
    sys.exit(app.return_code or 0)
