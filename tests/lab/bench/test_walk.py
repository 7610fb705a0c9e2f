"""How much code a reader meets who follows one chat: a feature that a request does not use has no module on its way."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

WALK = Path(__file__).parents[3] / "lab/benchmarks/walk.py"
# Of these, 9 measure: what a router and a node tell of a chat, and what a beat shows of ranks, their steps and their cache.
# Whether the walk shows what runs now and then, for example of membership or the book of usage, is chance: four modules.
# Epochs of leaders, series found quickly and the tables of nodes came last.
MOST, MOST_OF_THE_CHAT_ALONE = 198, 112


@pytest.mark.cluster
@pytest.mark.long
def test_a_chat_passes_few_modules() -> None:
    done = subprocess.run([sys.executable, WALK, "--list"], capture_output=True, text=True, timeout=110, check=True)
    alone = [line for line in done.stdout.splitlines() if line.startswith("* ryzanstein")]
    idle_too = [line for line in done.stdout.splitlines() if line.startswith("  ryzanstein")]
    assert 50 < len(alone) <= MOST_OF_THE_CHAT_ALONE, alone
    assert len(alone) + len(idle_too) <= MOST, idle_too
