"""The rows of a measurement: which models in which formats, and how each is opened."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ryzanstein import errors
from ryzanstein.files.model_paths import is_gguf, model_name
from ryzanstein.lab.bench.quality.document import QualityRow
from ryzanstein.lab.bench.quality.llama_model import LlamaModel
from ryzanstein.lab.bench.quality.models import ModelRoom, OwnModel, ScoredModel, own_bytes
from ryzanstein.worker.json_files import UnreadableFile, parse_object, read_bytes
from ryzanstein.worker.settings.quantization import QUANTIZATIONS, Quantization

OWN, LLAMA_CPP = "ryzanstein", "llama.cpp"
PEERS = (LLAMA_CPP,)
_FULL: Quantization = "none"
_WEIGHT_SUFFIXES = (".safetensors", ".gguf")


@dataclass(frozen=True, slots=True)
class RowPlan:
    """A row to measure. `python`: of the environment that has llama.cpp, if the row is its."""

    engine: str
    quantization: Quantization
    model: Path
    python: Path | None = None

    @property
    def name(self) -> str:
        visible = self.model.name if is_gguf(self.model) else model_name(self.model)
        return f"{visible}, {self.quantization if self.engine == OWN else self.engine}"

    def empty(self) -> QualityRow:
        """Returns the row without measurements."""
        files = _weight_files(self.model)
        identity = " ".join(f"{file.name}:{file.stat().st_size}:{file.stat().st_mtime_ns}" for file in files)
        size = sum(file.stat().st_size for file in files)
        return QualityRow(self.name, self.engine, self.quantization, str(self.model.resolve()), identity, 0, size)

    def memory_bytes(self, room: ModelRoom) -> int:
        """Returns about what it takes to open it. Raises ModelRefused."""
        return own_bytes(self.model, self.quantization, room) if self.python is None else self.empty().file_bytes

    def open(self, room: ModelRoom) -> ScoredModel:
        """Raises ModelRefused or LlamaFailed."""
        if self.python is None:
            return OwnModel(self.model, self.quantization, room)
        return LlamaModel(self.python, self.model, room)


def plan_rows(models: Sequence[Path], formats: Sequence[Quantization], peers: Mapping[str, Path]) -> list[RowPlan]:
    """Returns the rows; the first is the reference: the first model without quantization.

    A directory of float weights has a row for each format; a GGUF file and a directory that is
    quantized already have one, as they are. `peers`: the Python of each, which runs the GGUF files.
    Raises INVALID_ARGUMENT for a path that is no model, or a reference that is quantized.
    """
    for model in models:
        _check(model)
    if _is_quantized(models[0]):
        raise errors.invalid("model", "the first must be a directory of float weights: it is the reference", str(models[0]))
    rows = [RowPlan(OWN, _FULL, models[0])]
    for model in models:
        rows += [RowPlan(OWN, kind, model) for kind in ((_FULL,) if _is_quantized(model) else formats)]
        rows += [RowPlan(name, _FULL, model, python) for name, python in peers.items() if is_gguf(model)]
    unique = list(dict.fromkeys(rows))
    names = [row.name for row in unique]
    twin = next((name for i, name in enumerate(names) if name in names[:i]), None)
    if twin is not None:
        raise errors.invalid("model", "each directory and file needs a name of its own", twin)
    return unique


def formats_of(text: str) -> tuple[Quantization, ...]:
    """Parses `none,int8`. Raises INVALID_ARGUMENT for an unknown one."""
    names = [name for name in text.split(",") if name]
    chosen = tuple(kind for kind in QUANTIZATIONS if kind in names)
    if len(chosen) != len(set(names)):
        raise errors.invalid("formats", f"must be any of {', '.join(QUANTIZATIONS)}", text)
    return chosen


def _check(model: Path) -> None:
    if not _weight_files(model):
        raise errors.invalid("model", "must be a GGUF file, or a directory with safetensors", str(model))


def _weight_files(model: Path) -> list[Path]:
    if model.is_dir():
        return sorted(path for path in model.iterdir() if path.suffix in _WEIGHT_SUFFIXES)
    return [model] if is_gguf(model) and model.exists() else []


def _is_quantized(model: Path) -> bool:
    if is_gguf(model):
        return True
    try:
        return "quantization_config" in parse_object(read_bytes(model / "config.json"))
    except UnreadableFile as error:
        raise errors.invalid("model", f"{model / 'config.json'}: {error}") from error
