"""How a run of tests behaves as a whole: one failure, tests that are not run, a parent that ignores SIGINT."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from pathlib import Path

_STRICT = "error::pytest.PytestUnraisableExceptionWarning"
TESTS = """
import gc, signal, subprocess, sys
import pytest

def test_that_fails_and_leaves_a_pipe_open():
    process = subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.PIPE)
    process.wait()
    assert False

def test_its_neighbour():
    gc.collect()

@pytest.mark.parametrize("each", range(3))
def test_that_needs_a_program(each):
    pytest.skip("redis-server is not installed: make parts")

def test_that_interrupts():
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
"""


def test_failures_and_skips_stay_what_they_are(tmp_path: Path) -> None:
    shutil.copy(Path(__file__).with_name("conftest.py"), tmp_path)
    (tmp_path / "test_some.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-q", "-rfE", "-W", _STRICT, "-p", "no:cacheprovider", str(tmp_path)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    )
    assert "1 failed, 2 passed, 3 skipped" in done.stdout, done.stdout
    assert "NOT RUN: 3 tests: redis-server is not installed: make parts\n" in done.stdout
