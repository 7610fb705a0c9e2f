"""Where a peer's own Python is, what its processes see of this one's surroundings, and how it gets installed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from ryzanstein import errors
from ryzanstein.lab.bench.engine.peers.catalog import ENVIRONMENTS, Environment

_FOREIGN = ("PYTHONHOME", "VIRTUAL_ENV", "LD_PRELOAD")


def python_of(peers_dir: Path, environment: str) -> Path:
    """It need not exist."""
    return peers_dir / environment / "bin" / "python"


def process_environment(threads: int) -> Mapping[str, str]:
    """Runners are found, nothing is looked up on a network, and each process starts with as many threads as it may use."""
    kept = {name: value for name, value in os.environ.items() if name not in _FOREIGN}
    return kept | {
        "PYTHONPATH": str(Path(__file__).parent),
        "PYTHONSAFEPATH": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def choose_environments(names: Sequence[str]) -> Mapping[str, Environment]:
    """All without a name. INVALID_ARGUMENT for one that is not known."""
    for name in names:
        if name not in ENVIRONMENTS:
            raise errors.invalid("names", f"must be of {', '.join(ENVIRONMENTS)}", name)
    return {name: ENVIRONMENTS[name] for name in names} if names else ENVIRONMENTS


def install(peers_dir: Path, name: str, environment: Environment) -> None:
    """Makes the virtual environment and installs into it; pip's output is passed on. FAILED_PRECONDITION when it fails."""
    python = str(python_of(peers_dir, name))
    commands = [
        [sys.executable, "-m", "venv", str(peers_dir / name)],
        [python, "-m", "pip", "install", "--quiet", *environment.requirements],
    ]
    if environment.unneeded:
        commands.append([python, "-m", "pip", "uninstall", "--quiet", "--yes", *environment.unneeded])
    for command in commands:
        if (code := subprocess.run(command, check=False).returncode) != 0:
            raise errors.failed_precondition("INSTALLATION_FAILED", f"{name}: {' '.join(command)} ended with {code}")
