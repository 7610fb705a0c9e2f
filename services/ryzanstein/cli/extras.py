"""Which extras of the package a command needs, and what to install if they are missing."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from types import MappingProxyType

import typer

# One package of each extra stands for all of it.
_PACKAGES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"router": ("fastapi", "uvicorn", "httptools", "websockets", "msgspec"), "worker": ("torch", "tokenizers", "safetensors")}
)


def require(command: str, *extras: str) -> None:
    """Ends the command with exit code 2 and a sentence if one of the extras is not installed."""
    missing = [extra for extra in extras if any(find_spec(package) is None for package in _PACKAGES[extra])]
    if missing:
        wanted = ",".join(missing)
        said = f"`ryzanstein {command}` needs more than the base package: pip install 'ryzanstein[{wanted}]'"
        typer.echo(said, err=True)
        raise typer.Exit(2)
