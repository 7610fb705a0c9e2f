"""Whole simulations, each in a process of its own: time is replaced for good in it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

# Each broke a promise before it was mended: see docs/simulation.md.
PAST_FAILURES = (3, 6, 8, 9, 10, 12, 28, 61, 117, 5057, 5203, 767199570, 68676410, 374133889)

_PLANTED = """
from ryzanstein.lab.simulation import clock
clock.install()
from ryzanstein.router.core.admission import Admission
from ryzanstein.lab.simulation.checks import BrokenPromise
from ryzanstein.lab.simulation.plan import plan
from ryzanstein.lab.simulation.simulation import simulate
Admission.enter = Admission._taken
outcome = simulate(plan(8))
assert any(violation.failure is BrokenPromise.BOUND for violation in outcome.violations), outcome.violations
"""


def simulated(*arguments: str, hash_seed: int = 0) -> subprocess.CompletedProcess[str]:
    """One run of a program of the simulator's."""
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONHASHSEED": str(hash_seed)},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )


def one(seed: int, hash_seed: int = 0) -> dict[str, Any]:
    run = simulated("-m", "ryzanstein.lab.simulation.one", str(seed), hash_seed=hash_seed)
    assert run.returncode in (0, 1), run.stderr[-2000:]
    result: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return result


@pytest.mark.parametrize("seed", PAST_FAILURES)
def test_what_failed_once_holds(seed: int) -> None:
    result = one(seed)
    assert result["violations"] == []
    assert result["complete"] > 0


def test_a_seed_is_the_same_story_whatever_the_hash_seed() -> None:
    assert one(3, hash_seed=0)["digest"] == one(3, hash_seed=1)["digest"]


def test_the_command_replays_a_seed_and_tells_its_story() -> None:
    run = simulated("-m", "ryzanstein.lab.simulation", "--seed", "3", "--log")
    assert run.returncode == 0, run.stdout[-2000:]
    assert "seed: 3" in run.stdout
    assert "generation accepted" in run.stdout
    assert "answers complete" in run.stdout


def test_the_command_says_what_it_needs() -> None:
    run = simulated("-m", "ryzanstein.lab.simulation")
    assert run.returncode == 2
    assert "--seed" in run.stderr


def test_a_planted_fault_is_found() -> None:
    run = simulated("-c", _PLANTED)
    assert run.returncode == 0, run.stderr[-2000:]
