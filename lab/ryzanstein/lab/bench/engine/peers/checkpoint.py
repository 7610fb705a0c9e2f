"""The chosen model: a directory, a GGUF file, the embedded model, or a preset of `ryzanstein synthesize`.

A preset is made once and kept.
"""

from __future__ import annotations

import os
import subprocess
import sys
import zlib
from pathlib import Path

import ryzanstein.demo
from ryzanstein import errors
from ryzanstein.files.model_paths import is_gguf
from ryzanstein.tools.synthesize.shapes import PRESETS

_DEMO = "demo"


def checkpoint(name: str, cache_dir: Path) -> Path:
    """Returns the directory of a checkpoint, or the GGUF file.

    Raises INVALID_ARGUMENT for what is neither a name nor one of these, and FAILED_PRECONDITION if
    it cannot be written.
    """
    if name == _DEMO:
        return Path(next(iter(ryzanstein.demo.__path__)))
    if name in PRESETS:
        return _synthesized(name, cache_dir / "models")
    path = Path(name)
    if not path.is_dir() and not (is_gguf(path) and path.is_file()):
        raise errors.invalid("model", f"must be a directory, a GGUF file or one of {', '.join((_DEMO, *PRESETS))}", name)
    return path


def _synthesized(preset: str, models_dir: Path) -> Path:
    """Returns the directory of a preset, which it creates once.

    Its name contains a hash of the shape's numbers, so that another shape of that name gets another
    directory. A separate process writes it, so this one holds no tensors besides what it measures.
    """
    path = models_dir / f"{preset}-{zlib.crc32(repr(PRESETS[preset]).encode()):08x}"
    if path.exists():
        return path
    models_dir.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    command = [sys.executable, "-P", "-m", "ryzanstein.tools.synthesize.command", str(unfinished), "--preset", preset]
    if (code := subprocess.run(command, check=False, stdout=sys.stderr).returncode) != 0:
        raise errors.failed_precondition("MODEL_INVALID", f"preset {preset}: synthesize ended with {code}")
    os.replace(unfinished, path)
    return path
