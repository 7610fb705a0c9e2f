"""What makes faults does make them: a small disk is full, a clock jumps, a process is slowed down."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from ryzanstein.chaos import small_disk
from ryzanstein.chaos.child import Child
from ryzanstein.chaos.clocks import Clocks
from ryzanstein.chaos.network import NetworkImpossibleError
from ryzanstein.chaos.redis_server import RedisServer
from ryzanstein.chaos.signals import family, stopped
from ryzanstein.chaos.small_disk import SmallDisk
from ryzanstein.cli.host import LOCAL

_SPIN = "while True: pass"


@pytest.fixture
def spinner() -> Child:
    return Child((sys.executable, "-I", "-S", "-c", _SPIN))


def stopped_share(pid: int, samples: int = 200) -> float:
    """How often it stands still when it is looked at, which does not depend on what else this machine does."""
    process = psutil.Process(pid)
    seen = 0
    for _ in range(samples):
        seen += process.status() == psutil.STATUS_STOPPED
        time.sleep(0.003)
    return seen / samples


def test_a_full_disk_refuses_and_an_emptied_one_takes_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small_disk, "SIZE_BYTES", 2**20)
    directory = tmp_path / "disk"
    try:
        with SmallDisk(directory) as disk:
            assert disk.fill() > 2**19
            with pytest.raises(OSError, match="No space left"), (directory / "more").open("wb", buffering=0) as file:
                file.write(b"x")
            disk.empty()
            (directory / "more").write_bytes(b"x")
        assert list(directory.iterdir()) == [], "it is another disk's directory again"
    except NetworkImpossibleError as impossible:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(str(impossible))


def test_a_service_has_a_clock_of_its_own(tmp_path: Path, part: Callable[[str], str]) -> None:
    part("cc")
    clocks = Clocks(tmp_path)
    environment = {**os.environ, **clocks.environment("node-0")}
    command = (sys.executable, "-c", "import time; print(time.time(), time.monotonic())")

    def off_s() -> tuple[float, float]:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        wall, monotonic = map(float, done.stdout.split())
        return wall - time.time(), monotonic - time.monotonic()

    for offset_s in (0, 3600, -3600):
        clocks.turn("node-0", offset_s)
        wall_s, monotonic_s = off_s()
        assert wall_s == pytest.approx(offset_s, abs=30)
        assert monotonic_s == pytest.approx(0, abs=30)


def test_a_throttled_process_gets_a_twentieth_and_then_all_again(spinner: Child) -> None:
    spinner.start()
    assert spinner.pid is not None
    throttle = Child((sys.executable, "-m", "ryzanstein.chaos.throttle", str(spinner.pid), "20"), interactive=True)
    try:
        assert stopped_share(spinner.pid, 20) == 0
        throttle.start()
        time.sleep(1.0)
        assert stopped_share(spinner.pid) > 0.7
        throttle.release()
        assert stopped_share(spinner.pid, 20) == 0
    finally:
        throttle.kill()
        spinner.kill()


async def test_stopped_processes_go_on_afterwards(spinner: Child) -> None:
    spinner.start()
    assert spinner.pid is not None
    try:
        async with stopped(family(spinner.pid)):
            await asyncio.sleep(0.1)
            assert psutil.Process(spinner.pid).status() == psutil.STATUS_STOPPED
        await asyncio.sleep(0.1)
        assert psutil.Process(spinner.pid).status() != psutil.STATUS_STOPPED
    finally:
        spinner.kill()


def test_a_killed_redis_comes_back_with_what_it_was_told(tmp_path: Path, part: Callable[[str], str]) -> None:
    part("redis-server")
    import redis

    from ryzanstein.cli.ports import free_ports

    (port,) = free_ports(1)
    server = RedisServer(LOCAL, tmp_path, port)
    server.start()
    try:
        with redis.Redis.from_url(server.url) as told:
            told.set("key", "value")
        server.kill()
        assert not server.running
        server.start()
        with redis.Redis.from_url(server.url) as asked:
            assert asked.get("key") == b"value"
    finally:
        server.kill()
