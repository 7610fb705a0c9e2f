"""The packages that vLLM's processes need for our sampler: ours, and llguidance in the version of the node."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import ryzanstein

_GUEST_NAME = "ryzanstein_llguidance"
"""The name that llguidance has there, see `constraints.guidance`: vLLM has another version."""
_NOTHING_ELSE = shutil.ignore_patterns("__pycache__", "*.pyc")


def plugin_packages() -> Iterator[tuple[str, Path]]:
    """Yields the name and the folder of each package. Ours may be in several folders, which Python joins."""
    for path in ryzanstein.__path__:
        yield "ryzanstein", Path(path).resolve()
    guidance = find_spec("llguidance")
    for path in (guidance.submodule_search_locations or ()) if guidance is not None else ():
        yield _GUEST_NAME, Path(path).resolve()


def write_plugin(folder: Path) -> None:
    """Copies the packages into a folder, for vLLM's PYTHONPATH. Raises OSError."""
    for name, source in plugin_packages():
        shutil.copytree(source, folder / name, ignore=_NOTHING_ELSE, dirs_exist_ok=True)
