"""The subcommands that are programs of their own: arguments, help and exit codes are the program's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ryzanstein.cli.programs import PROGRAMS


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("ryzanstein")), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    ("name", "flag"),
    [
        ("router", "--http-port"),
        ("orchestrator", "--lease-s"),
        ("worker", "--threads-per-rank"),
        ("synthesize", "--preset"),
        ("bench", "engine"),
    ],
)
def test_help_is_the_programs_own(name: str, flag: str) -> None:
    assert name in PROGRAMS
    done = run(name, "--help")
    assert done.returncode == 0
    assert flag in done.stdout


def test_bad_settings_are_exit_code_2_and_named() -> None:
    done = run("orchestrator", "--lease-s", "-1")
    assert done.returncode == 2
    assert "lease_s" in done.stderr
