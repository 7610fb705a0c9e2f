"""`ryzanstein bench adapters` as a user runs it: a thousand adapters on two nodes, for a minute instead of five.

The nodes hold fewer, so that a minute fills them.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.cluster, pytest.mark.lab, pytest.mark.timeout(900)]


def test_a_thousand_adapters_answer_rightly_within_their_memory(tmp_path: Path) -> None:
    command = (str(Path(sys.executable).parent / "ryzanstein"), "bench", "adapters", "--seconds", "60", "--resident", "30")
    done = subprocess.run(
        [*command, "--json", str(tmp_path / "a.json")], capture_output=True, text=True, timeout=880, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "a.json").read_text())
    answers, memory = found["answers"], found["memory"]
    assert answers["failures"] == answers["wrong"] == []
    assert answers["compared"] > answers["alone"] > 40
    assert answers["different"] > answers["alone"] // 2
    assert answers["adapters"] > 50
    assert 0 < memory["adapter_bytes"] <= memory["budget"]
    assert 0 < memory["held_bytes"] <= memory["budget"]
    assert found["frames"]["registered"]["beat_bytes"] == found["frames"]["before"]["beat_bytes"]
    assert found["frames"]["asked"]["beat_bytes"] == found["frames"]["before"]["beat_bytes"]
    for name in ("node-0", "node-1", "router-0", "orchestrator"):
        grown = found["sizes"]["registered"][f"{name} series"] - found["sizes"]["before"][f"{name} series"]
        assert grown < found["plan"]["adapters"], f"{name} has series for each adapter"
    assert sum(node["adapter_evictions_total"] for node in found["nodes"].values()) > 0
    assert found["ratio"] > 0
