"""A peer's own Python, the environment of its processes, and how it is installed."""

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
    """Returns the path, which need not exist."""
    return peers_dir / environment / "bin" / "python"


def process_environment(threads: int) -> Mapping[str, str]:
    """Returns the environment of a peer's processes.

    Runners are found, no network is used for look-ups, and each process starts with as many threads
    as it may use.
    """
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
    """Returns the named environments, all without names.

    Raises INVALID_ARGUMENT for an unknown one.
    """
    for name in names:
        if name not in ENVIRONMENTS:
            raise errors.invalid("names", f"must be one of {', '.join(ENVIRONMENTS)}", name)
    return {name: ENVIRONMENTS[name] for name in names} if names else ENVIRONMENTS


def install(peers_dir: Path, name: str, environment: Environment) -> None:
    """Creates the virtual environment and installs into it; pip's output is passed on.

    Raises FAILED_PRECONDITION if it fails.
    """
    python = str(python_of(peers_dir, name))
    commands = [
        [sys.executable, "-P", "-m", "venv", str(peers_dir / name)],
        [python, "-P", "-m", "pip", "install", "--quiet", *environment.requirements],
    ]
    if environment.unneeded:
        commands.append([python, "-P", "-m", "pip", "uninstall", "--quiet", "--yes", *environment.unneeded])
    for command in commands:
        if (code := subprocess.run(command, check=False).returncode) != 0:
            raise errors.failed_precondition("INSTALLATION_FAILED", f"{name}: {' '.join(command)} ended with {code}")
