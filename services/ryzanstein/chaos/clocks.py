"""A wall clock of its own for each service, by libfaketime; monotonic time stays the machine's."""

from __future__ import annotations

from pathlib import Path

from ryzanstein.chaos.network import NetworkImpossibleError

_LIBRARY = "faketime/libfaketimeMT.so.1"
_PLACES = ("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib")
_LOOK_EVERY_S = "1"


def library() -> str:
    """Where libfaketime is. NetworkImpossibleError: it is not installed."""
    for place in _PLACES:
        if (path := Path(place, _LIBRARY)).exists():
            return str(path)
    raise NetworkImpossibleError("libfaketime is not installed (make parts)")


class Clocks:
    """One file per service says how far its clock is off; libfaketime reads it every second."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._directory.mkdir(parents=True, exist_ok=True)

    def environment(self, name: str) -> dict[str, str]:
        """What a service with this clock is started with."""
        self.turn(name, 0)
        return {
            "LD_PRELOAD": library(),
            "FAKETIME_TIMESTAMP_FILE": str(self._file(name)),
            "FAKETIME_CACHE_DURATION": _LOOK_EVERY_S,
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        }

    def turn(self, name: str, offset_s: int) -> None:
        """The service's clock is so far ahead (or behind) from the next look on."""
        self._file(name).write_text(f"{offset_s:+d}\n")

    def _file(self, name: str) -> Path:
        return self._directory / f"{name}.clock"
