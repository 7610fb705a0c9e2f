"""The examples of the Python client, as they stand, against a cluster."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "clients" / "python" / "examples"
PRINTED = {
    "conversation.py": r"Your name is Tavik\.\n- My name is Tavik\.",
    "many.py": r"Count from 1 to 22\..* 21 22\n",
    "resume.py": r"^1 2 3.*\|.* 39 40\n",
    "stream.py": r"^1 2 3 .* 39 40\n",
    "structured.py": r"^(Rome|Oslo) (True|False)\n",
    "tools.py": r"\S",
}
TOLD = {"stream.py": r"node-\d: \d+ tokens", "tools.py": r"^called: weather\("}


def test_each_example_is_tried() -> None:
    assert sorted(path.name for path in EXAMPLES.glob("*.py")) == sorted(PRINTED)


@pytest.mark.parametrize("name", PRINTED)
@pytest.mark.long
def test_an_example_works(calm: Any, name: str) -> None:
    command = [sys.executable, "-P", str(EXAMPLES / name), calm.cluster.router_address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert re.search(PRINTED[name], done.stdout), done.stdout
    assert re.search(TOLD.get(name, ""), done.stderr), done.stderr
    assert done.stderr.count("called:") <= 1, "a call that is asked for is asked for once"
