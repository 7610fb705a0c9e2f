"""The finished runs of a campaign, in a file, so that an interrupted campaign continues from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from ryzanstein.lab.chaos.trial.observation import Observation


class ForeignProgressError(ValueError):
    """The file is not of a campaign like this one."""


@dataclass(frozen=True, slots=True)
class Conditions:
    """What runs have to have in common to be counted together."""

    version: str
    cpu: str
    cores: int
    seed: str
    clients: int
    secure: bool = False


@dataclass(frozen=True, slots=True)
class FinishedRun:
    """One run. `took_s` is the time since the previous one, with everything in between."""

    took_s: float
    observation: Observation


_CONDITIONS = TypeAdapter(Conditions)
_RUN = TypeAdapter(FinishedRun)


class Progress:
    """The runs that have finished: one line of JSON each, after a line with the conditions.

    `path` None keeps them in memory only.

    Raises ForeignProgressError if the file has other conditions or is damaged. A last line without
    an end was being written when the campaign died, and is dropped.
    """

    def __init__(self, path: Path | None, conditions: Conditions) -> None:
        self._path = path
        self.runs: list[FinishedRun] = []
        if path is None:
            return
        if path.exists() and (lines := path.read_bytes().splitlines(keepends=True)):
            self.runs = _read(path, lines, conditions)
        self._write(_CONDITIONS.dump_json(conditions), *map(_RUN.dump_json, self.runs))

    def add(self, run: FinishedRun) -> None:
        """Records a run."""
        self.runs.append(run)
        if self._path is not None:
            with self._path.open("ab") as file:
                file.write(_RUN.dump_json(run) + b"\n")

    def finish(self) -> None:
        """Removes the file: the campaign has ended and its results are written elsewhere."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    @property
    def took_s(self) -> float:
        """Returns the time that all runs took."""
        return sum(run.took_s for run in self.runs)

    def _write(self, *lines: bytes) -> None:
        assert self._path is not None
        written = self._path.with_name(f"{self._path.name}.new")
        written.write_bytes(b"".join(line + b"\n" for line in lines))
        written.replace(self._path)


def _read(path: Path, lines: Sequence[bytes], conditions: Conditions) -> list[FinishedRun]:
    whole = [line for line in lines if line.endswith(b"\n")]
    try:
        theirs = _CONDITIONS.validate_json(whole[0])
        runs = [_RUN.validate_json(line) for line in whole[1:]]
    except (IndexError, ValidationError) as invalid:
        raise ForeignProgressError(f"{path} is not the progress of a campaign: {str(invalid).splitlines()[0]}") from None
    if theirs != conditions:
        raise ForeignProgressError(
            f"{path} is of another campaign: {_difference(asdict(theirs), asdict(conditions))}; remove it"
        )
    return runs


def _difference(theirs: dict[str, Any], ours: dict[str, Any]) -> str:
    return ", ".join(f"{name} {theirs[name]}, not {ours[name]}" for name in ours if theirs[name] != ours[name])
