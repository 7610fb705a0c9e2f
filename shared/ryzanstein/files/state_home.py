"""Where state is kept unless a setting says otherwise.

The first that is set and absolute: `STATE_DIRECTORY`, which systemd sets for a unit with
`StateDirectory=`; `ryzanstein` in `XDG_STATE_HOME`; `.local/state/ryzanstein` in `HOME`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

VARIABLES = "STATE_DIRECTORY, XDG_STATE_HOME or HOME"
_PLACES: Mapping[str, Path] = {
    "STATE_DIRECTORY": Path(),
    "XDG_STATE_HOME": Path("ryzanstein"),
    "HOME": Path(".local/state/ryzanstein"),
}


def state_home() -> Path | None:
    """Returns the directory of all state. None: the environment names none."""
    for variable, below in _PLACES.items():
        named = Path(os.environ.get(variable, "").split(":")[0])
        if named.is_absolute():
            return named / below
    return None


def default_state(*parts: str) -> Callable[[], Path]:
    """Returns the default of a setting: a path in the state home, or a relative one where there is none."""

    def state_home_path() -> Path:
        return (state_home() or Path()).joinpath(*parts)

    return state_home_path
