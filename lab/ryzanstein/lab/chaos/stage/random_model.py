"""A small model with random weights."""

from __future__ import annotations

import subprocess
import sys
import zlib
from pathlib import Path

from ryzanstein.cli.processes.service_process import ServiceFailedError

_MAKE_S = 60.0


def random_model(directory: Path, preset: str = "S") -> Path:
    """Writes the model and returns its directory. Each directory's name gives other weights.

    Raises ServiceFailedError.
    """
    seed = str(zlib.crc32(directory.name.encode()) % 1000)
    program = (sys.executable, "-P", "-m", "ryzanstein.tools.synthesize.command")
    command = (*program, str(directory), "--preset", preset, "--seed", seed)
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_MAKE_S)
    except subprocess.CalledProcessError as failure:
        raise ServiceFailedError(f"the model {directory.name} cannot be made: {failure.stderr[-500:]}") from None
    except subprocess.TimeoutExpired:
        raise ServiceFailedError(f"the model {directory.name} was not made within {_MAKE_S:g} s") from None
    return directory
