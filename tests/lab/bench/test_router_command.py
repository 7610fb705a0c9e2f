"""`ryzanstein bench router` as a user runs it, small: real proxies, a real router, every answer checked."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.cluster

SMALL = ("--rounds", "1", "--seconds", "0.2", "--streams", "4", "--first-tokens", "10")
BOUNDS = ("--idle", "20", "--active", "20", "--many", "100", "--many-tokens", "4", "--slow", "2", "--slow-tokens", "200")


async def bench(*options: str) -> tuple[int | None, str, str]:
    command = (str(Path(sys.executable).parent / "ryzanstein"), "bench", "router", *options)
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE)
    message, complained = await asyncio.wait_for(process.communicate(), 110)
    return process.returncode, message.decode(), complained.decode()


async def test_every_system_gives_every_token_and_the_document_says_so(part: Callable[[str], str], tmp_path: Path) -> None:
    part("nginx")
    code, _, complained = await bench(
        *SMALL, *BOUNDS, "--systems", "ryzanstein,nginx,direct", "--json", str(tmp_path / "r.json")
    )
    assert code == 0, complained
    document = json.loads((tmp_path / "r.json").read_text())
    rows = {row["system"]: row for row in document["results"]}
    assert set(rows) == {"ryzanstein", "nginx", "direct"}
    for row in rows.values():
        assert row["streams"] == 4
        assert row["errors"] == row["request_errors"] == 0
        assert min(row["tokens_per_s"], row["requests_per_s"], row["delay_p99_s"]) > 0
    assert rows["direct"]["added_ttft_p50_s"] == 0
    assert rows["nginx"]["tokens_per_message"] == 1
    assert rows["ryzanstein"]["added_ttft_p99_s"] > 0
    assert [row["errors"] for row in document["many_streams"] + document["slow_readers"]] == [0] * 4


async def test_wrong_options_are_refused_by_name() -> None:
    code, _, complained = await bench("--systems", "apache")
    assert code == 2
    assert "--systems" in complained


async def test_what_it_started_ends_with_it() -> None:
    command = (str(Path(sys.executable).parent / "ryzanstein"), "bench", "router", *SMALL, "--systems", "ryzanstein")
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    assert process.stderr is not None
    assert b"round 1" in await asyncio.wait_for(process.stderr.readline(), 60)
    family = psutil.Process(process.pid).children(recursive=True)
    assert family
    process.terminate()
    assert await asyncio.wait_for(process.wait(), 60) == 128 + signal.SIGTERM
    assert [child for child in family if child.is_running() and child.status() != psutil.STATUS_ZOMBIE] == []
