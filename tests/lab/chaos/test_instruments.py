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

from ryzanstein.cli.processes.host import LOCAL
from ryzanstein.lab.chaos.machines import small_disk
from ryzanstein.lab.chaos.machines.child import Child
from ryzanstein.lab.chaos.machines.clocks import Clocks
from ryzanstein.lab.chaos.machines.fast_clock import FastClock
from ryzanstein.lab.chaos.machines.network import NetworkImpossibleError
from ryzanstein.lab.chaos.machines.preloaded import INJECTION_DIR
from ryzanstein.lab.chaos.machines.redis_server import RedisServer
from ryzanstein.lab.chaos.machines.small_disk import SmallDisk
from ryzanstein.lab.chaos.stage.pace import FastPace
from ryzanstein.lab.chaos.stage.signals import family, stopped

pytestmark = pytest.mark.long

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


_WAITS = """
import asyncio, select, threading, time
def took(wait):
    began = time.monotonic(), time.time()
    wait()
    print(time.monotonic() - began[0], time.time() - began[1])
def condition():
    each = threading.Condition()
    with each: each.wait(20)
took(lambda: time.sleep(20))
took(lambda: threading.Event().wait(20))
took(lambda: threading.Lock().acquire() and threading.Semaphore(0).acquire(timeout=20))
took(condition)
took(lambda: select.select([], [], [], 20))
took(lambda: select.poll().poll(20_000))
took(lambda: select.epoll().poll(20))
took(lambda: asyncio.run(asyncio.sleep(20)))
"""


def test_on_a_fast_clock_every_wait_takes_its_time_and_is_over_sooner(tmp_path: Path, part: Callable[[str], str]) -> None:
    part("cc")
    clock = FastClock(tmp_path)
    environment = {**os.environ, **clock.environment()}
    clock.run_at(40)
    began = time.monotonic()
    done = subprocess.run((sys.executable, "-c", _WAITS), env=environment, capture_output=True, text=True, check=True)
    took = [tuple(map(float, line.split())) for line in done.stdout.splitlines()]
    assert len(took) == 8
    assert all(monotonic_s > 19.9 and wall_s > 19.9 for monotonic_s, wall_s in took)
    assert sum(monotonic_s for monotonic_s, _ in took) > 10 * (time.monotonic() - began)


async def test_time_that_passes_ends_with_the_clocks_alike_in_pace(tmp_path: Path, part: Callable[[str], str]) -> None:
    part("cc")
    clock = FastClock(tmp_path)
    await clock.pass_time(60.0, rate=100.0)
    ahead_s = clock.ahead_s
    assert ahead_s >= 60.0
    await asyncio.sleep(0.05)
    assert clock.ahead_s == ahead_s
    command = (sys.executable, "-c", "import time; print(time.monotonic())")
    pipe, environment = asyncio.subprocess.PIPE, {**os.environ, **clock.environment()}
    process = await asyncio.create_subprocess_exec(*command, env=environment, stdout=pipe)
    message, _ = await process.communicate()
    assert float(message) - time.monotonic() == pytest.approx(ahead_s, abs=30)


_RANK = """
import os, sys, time, types
class ModelRunner:
    def execute(self): return "a step"
sys.modules["ryzanstein.worker.model.runner"] = types.SimpleNamespace(ModelRunner=ModelRunner)
if os.fork() == 0:
    began = time.monotonic()
    print(ModelRunner().execute(), time.monotonic() - began)
"""


def test_a_rank_that_is_forked_keeps_pace(tmp_path: Path) -> None:
    pace = FastPace(tmp_path / "pace")
    environment = {**os.environ, **pace.environment(), "PYTHONPATH": str(INJECTION_DIR)}
    command = (sys.executable, "-c", _RANK, "ryzanstein.worker.ranks.rank")

    def step_s() -> float:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        assert done.stdout.startswith("a step "), done.stderr
        return float(done.stdout.split()[-1])

    pace.set(0.5)
    assert step_s() >= 0.5
    pace.set(0.0)
    assert step_s() < 0.5


def test_a_throttled_process_gets_a_twentieth_and_then_all_again(spinner: Child) -> None:
    spinner.start()
    assert spinner.pid is not None
    throttle = Child((sys.executable, "-m", "ryzanstein.lab.chaos.machines.throttle", str(spinner.pid), "20"), interactive=True)
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


def test_a_killed_redis_comes_back_with_what_it_was_announced(tmp_path: Path, part: Callable[[str], str]) -> None:
    part("redis-server")
    import redis

    from ryzanstein.cli.processes.ports import free_ports

    (port,) = free_ports(1)
    server = RedisServer(LOCAL, tmp_path, port)
    server.start()
    try:
        with redis.Redis.from_url(server.url) as client:
            client.set("key", "value")
        server.kill()
        assert not server.running
        server.start()
        with redis.Redis.from_url(server.url) as asked:
            assert asked.get("key") == b"value"
    finally:
        server.kill()
