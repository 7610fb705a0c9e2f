"""How many ranks a node of `ryzanstein up` has if nobody says it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from ryzanstein.demo import MODEL_DIR

DEFAULT_TP = 2


def default_tp(models: Sequence[Path]) -> int:
    """Returns 2, or 1 if one of the models has but one head.

    What cannot be read is not refused here: its node says why.
    """
    return DEFAULT_TP if all(_divides(model) for model in models if model != MODEL_DIR) else 1


def _divides(model: Path) -> bool:
    command = [sys.executable, "-P", "-m", "ryzanstein.tools.inspect", str(model), "--device", "cpu", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        return DEFAULT_TP in json.loads(done.stdout)["possible_tp"]
    except ValueError:
        return True
