"""Logs in files of bounded size: every line is in one of them, whoever wrote it and however it ended."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from ryzanstein.observe.log_files import LogFile, Rotation, older

WRITES = """
import os, sys, structlog
from ryzanstein.observe import log
from ryzanstein.observe.log_files import Rotation
log.setup_service("router", rotation=Rotation(4096, 3))
"""


def opened(path: Path, rotation: Rotation) -> LogFile:
    return LogFile(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), rotation)


def files(path: Path) -> list[Path]:
    """All files of a log, the oldest first."""
    numbered = [Path(older(str(path), number)) for number in range(9, 0, -1)]
    return [file for file in (*numbered, path) if file.exists()]


def lines(path: Path) -> list[str]:
    return "".join(file.read_text() for file in files(path)).splitlines()


def test_a_full_file_is_renamed_and_the_oldest_is_removed(tmp_path) -> None:
    path = tmp_path / "a.log"
    with opened(path, Rotation(100, 2)) as log:
        for number in range(100):
            log.write(b"%09d\n" % number)
    assert [file.name for file in files(path)] == ["a.log.2", "a.log.1", "a.log"]
    assert max(file.stat().st_size for file in files(path)) == 100
    assert lines(path) == [f"{number:09d}" for number in range(70, 100)][-len(lines(path)) :]
    assert path.stat().st_mode & 0o777 == 0o600


def test_writers_of_one_file_follow_each_other_and_lose_nothing(tmp_path) -> None:
    path = tmp_path / "a.log"
    first, second = opened(path, Rotation(1000, 1000)), opened(path, Rotation(1000, 1000))

    def write(log: LogFile, name: bytes) -> None:
        for number in range(2000):
            log.write(b"%s %d\n" % (name, number))

    threads = [threading.Thread(target=write, args=each) for each in ((first, b"x"), (second, b"y"))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    first.close()
    second.close()
    written = [line for file in tmp_path.iterdir() for line in file.read_text().splitlines()]
    assert sorted(written) == sorted(f"{name} {number}" for name in "xy" for number in range(2000))
    assert len(list(tmp_path.iterdir())) > 10


@pytest.mark.parametrize("spoil", ["pipe", "removed folder", "never"])
def test_what_cannot_be_continued_is_written_all_the_same(tmp_path, spoil) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    if spoil == "pipe":
        source, descriptor = os.pipe()
    else:
        descriptor = os.open(folder / "a.log", os.O_RDWR | os.O_APPEND | os.O_CREAT)
        source = os.dup(descriptor)
    log = LogFile(descriptor, Rotation(0 if spoil == "never" else 1))
    log.write(b"1\n")
    if spoil == "removed folder":
        (folder / "a.log").unlink()
        folder.rmdir()
    log.write(b"2\n")
    assert (os.read(source, 9) if spoil == "pipe" else os.pread(source, 9, 0)) == b"1\n2\n"
    log.close()
    os.close(source)


def test_a_service_bounds_its_own_lines_those_of_libraries_and_its_last_words(tmp_path) -> None:
    path = tmp_path / "router.log"
    program = WRITES + (
        "for number in range(60): structlog.get_logger().info('ours', number=number)\n"
        "for number in range(60): os.write(2, b'native %d\\n' % number)\n"
        "import ctypes; ctypes.string_at(0)\n"
    )
    with path.open("ab") as log:
        done = subprocess.run([sys.executable, "-c", program], stdout=log, stderr=log, timeout=60, check=False)
    assert done.returncode == -11
    deadline = time.monotonic() + 30
    while not (text := "\n".join(lines(path))).count("Segmentation fault") and time.monotonic() < deadline:
        time.sleep(0.05)  # the process that reads the pipe ends a moment later than the service
    records = [json.loads(line) for line in text.splitlines()]
    assert len(files(path)) == 4
    assert max(file.stat().st_size for file in files(path)) < 2 * 4096
    assert any("Segmentation fault" in record["event"] for record in records)
    assert [record["event"] for record in records if record["event"].startswith("native")][-1] == "native 59"
