"""What a process of stand-ins does for the benchmark: it takes orders as lines of JSON, and reports its state as others."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from typing import Any

REPORT_S = 0.05
Order = dict[str, Any]


async def obey(carry_out: Callable[[Order], Awaitable[None]], state: Callable[[], dict[str, Any]]) -> None:
    """Carries out orders one after the other until standard input ends, and reports the state all the time.

    A report's own lateness, `late_s`, says how busy this process is.
    """
    reporter = asyncio.create_task(_report(state))
    try:
        orders = asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(orders)
        await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, sys.stdin)
        while line := await orders.readline():
            await carry_out(json.loads(line))
    finally:
        reporter.cancel()


async def _report(state: Callable[[], dict[str, Any]]) -> None:
    loop, late_s = asyncio.get_running_loop(), 0.0
    while True:
        print(json.dumps({"late_s": round(late_s, 4), **state()}), flush=True)
        due = loop.time() + REPORT_S
        await asyncio.sleep(REPORT_S)
        late_s = loop.time() - due
