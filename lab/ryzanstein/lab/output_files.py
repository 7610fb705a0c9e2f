"""Files for what a program finds out, looked at before it begins: after hours it is too late."""

from __future__ import annotations

from pathlib import Path

import typer


def check_writable(path: Path | None, option: str) -> None:
    """Raises BadParameter if the file cannot be written. It exists after this; None is no file."""
    if path is None:
        return
    try:
        path.open("a").close()
    except OSError as error:
        raise typer.BadParameter(f"{path} cannot be written: {error.strerror}", param_hint=option) from None
