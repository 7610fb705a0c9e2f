"""The directory beside DST in which interrupted work, a quantization or a training, waits to go on.

Of a quantization it has the finished parts of the model, the calibration's hidden states before the next
layer, and `state.json`, which says what is finished. Every file appears complete, by renaming; what
state.json does not name yet is computed again.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ryzanstein.tools.atomic import sync
from ryzanstein.worker.json_files import UnreadableFile, read_object
from ryzanstein.worker.refusal import ModelRefused, excerpt

_STATE = "state.json"
_LOCK = "lock"
_VERSION = 1


@dataclass(frozen=True, slots=True)
class Work:
    """What is done: the end of the directory's name, and a word for people."""

    suffix: str
    name: str


QUANTIZATION = Work("quantizing", "quantization")
TRAINING = Work("finetuning", "training")


class PartialModel:
    """An opened directory of such work. `model` becomes DST."""

    def __init__(self, path: Path, state: dict[str, Any]) -> None:
        self.path, self.model, self._state = path, path / "model", state

    @classmethod
    @contextmanager
    def open(cls, target: Path, made_of: Mapping[str, Any], work: Work = QUANTIZATION) -> Iterator[PartialModel]:
        """Opens what an earlier run of `made_of` left, or begins.

        Raises ModelRefused if it is another's: of another model, other options or texts, or in use; OSError.
        """
        path = _path(target, work)
        path.mkdir(exist_ok=True)
        with (path / _LOCK).open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ModelRefused(f"{path} is in use: another process writes {target}") from None
            yield cls(path, _state(path, made_of, work.name))

    def __getitem__(self, key: str) -> Any:
        return self._state.get(key)

    def __setitem__(self, key: str, value: object) -> None:
        """Keeps a value, on disk before this returns."""
        self._state[key] = value
        _write_text(self.path / _STATE, json.dumps(self._state))

    def save(self, file: Path, tensors: Mapping[str, Tensor]) -> None:
        """Writes a safetensors file, complete or not at all. Raises OSError."""
        partial = file.with_name(f"{file.name}.partial")
        try:
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, partial, {"format": "pt"})
            shutil.copymode(self.path / _LOCK, partial)  # the library keeps its files private
            sync(partial)
        except SafetensorError as error:  # a full disk, in the library's words
            partial.unlink(missing_ok=True)
            raise OSError(None, str(error), str(file)) from error
        partial.replace(file)
        sync(file.parent)

    def load(self, file: Path) -> dict[str, Tensor]:
        """Returns a file's tensors, which may be changed."""
        return {name: tensor.clone() for name, tensor in load_file(file).items()}

    def remove(self) -> None:
        """Removes everything that is left.

        It is renamed first: half of it under its old name would be taken for an interrupted run's. Raises OSError.
        """
        away = self.path.with_name(f"{self.path.name}.{secrets.token_hex(4)}.removed")
        self.path.rename(away)
        shutil.rmtree(away, ignore_errors=True)


def begun_with(target: Path, option: str, work: Work) -> object:
    """Returns the value that an option has in the interrupted run which waits beside `target`; None where none waits."""
    try:
        earlier = read_object(_path(target, work) / _STATE).get("made_of")
    except (UnreadableFile, OSError):
        return None
    return earlier.get(option) if isinstance(earlier, dict) else None


def _path(target: Path, work: Work) -> Path:
    return target.with_name(f".{target.name}.{work.suffix}")


def _state(path: Path, made_of: Mapping[str, Any], work: str) -> dict[str, Any]:
    file = path / _STATE
    if not file.exists() or not (path / "model").is_dir():  # without `model`: a kill after it became DST
        return _begun(path, made_of)
    try:
        state = read_object(file)
    except UnreadableFile as error:
        raise ModelRefused(f"{file}: {error}; remove {path} to begin again") from error
    earlier = state.get("made_of")
    if state.get("version") == _VERSION and earlier == made_of:
        return state
    known = earlier if isinstance(earlier, dict) else {}
    different = [key for key in made_of if known.get(key) != made_of[key]] or ["version"]
    values = ", ".join(f"{key} {excerpt(known.get(key))}, now {excerpt(made_of.get(key))}" for key in different)
    raise ModelRefused(f"{path} was left by another {work} ({values}): go on with that one, or remove the directory")


def _begun(path: Path, made_of: Mapping[str, Any]) -> dict[str, Any]:
    """Removes files of which nobody knows what they were made of, and names the owner of those to come."""
    (path / _STATE).unlink(missing_ok=True)
    for left in path.iterdir():
        if left.is_dir():
            shutil.rmtree(left)
        elif left.name != _LOCK:
            left.unlink()
    (path / "model").mkdir()
    state = {"version": _VERSION, "made_of": dict(made_of)}
    _write_text(path / _STATE, json.dumps(state))
    return state


def _write_text(path: Path, text: str) -> None:
    partial = path.with_name(f"{path.name}.partial")
    with partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    sync(path.parent)
