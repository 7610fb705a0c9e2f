"""Which checkpoint is meant: a directory, the embedded model, or a preset of `ryzanstein synthesize`, made once and kept."""

from __future__ import annotations

import os
import subprocess
import sys
import zlib
from pathlib import Path

import ryzanstein.demo
from ryzanstein import errors
from ryzanstein.worker.model.shapes import PRESETS

_DEMO = "demo"


def checkpoint(name: str, cache_dir: Path) -> Path:
    """INVALID_ARGUMENT for what is neither a name nor a directory; FAILED_PRECONDITION when it cannot be written."""
    if name == _DEMO:
        return Path(next(iter(ryzanstein.demo.__path__)))
    if name in PRESETS:
        return _synthesized(name, cache_dir / "models")
    if not Path(name).is_dir():
        raise errors.invalid("model", f"must be a directory or of {', '.join((_DEMO, *PRESETS))}", name)
    return Path(name)


def _synthesized(preset: str, models_dir: Path) -> Path:
    """In a directory named after the shape's numbers too, so that another shape of that name is another directory. Another
    process writes it: this one holds no tensors beside what it measures."""
    path = models_dir / f"{preset}-{zlib.crc32(repr(PRESETS[preset]).encode()):08x}"
    if path.exists():
        return path
    models_dir.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    command = [sys.executable, "-m", "ryzanstein.worker.model.synthesize", str(unfinished), "--preset", preset]
    if (code := subprocess.run(command, check=False, stdout=sys.stderr).returncode) != 0:
        raise errors.failed_precondition("MODEL_INVALID", f"preset {preset}: synthesize ended with {code}")
    os.replace(unfinished, path)
    return path
