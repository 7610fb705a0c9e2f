"""Libraries that services preload, compiled from `injection/` where needed."""

from __future__ import annotations

import subprocess
from pathlib import Path

from ryzanstein.lab.chaos.machines.network import NetworkImpossibleError, program

INJECTION_DIR = Path(__file__).parent / "injection"


def built(source: str, directory: Path) -> Path:
    """Compiles a library into `directory`.

    Raises NetworkImpossibleError if that fails or there is no C compiler.
    """
    directory.mkdir(parents=True, exist_ok=True)
    library = (directory / source).with_suffix(".so")
    command = (program("cc"), "-O2", "-shared", "-fPIC", "-o", str(library), str(INJECTION_DIR / source), "-ldl")
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        raise NetworkImpossibleError(f"cc: {done.stderr.strip()}")
    return library
