"""The models of a suite: the embedded one and presets of `ryzanstein synthesize`, each in a weight format."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path

import ryzanstein.demo
from ryzanstein import errors
from ryzanstein.tools.convert.from_checkpoint import WRITTEN, to_file
from ryzanstein.tools.synthesize.command import Recipe, synthesize
from ryzanstein.tools.synthesize.shapes import PRESETS
from ryzanstein.worker.refusal import ModelRefused
from ryzanstein.worker.settings.quantization import QUANTIZATIONS, Quantization

DEMO = "demo"
DEMO_DIR = Path(next(iter(ryzanstein.demo.__path__)))
_FULL: Quantization = "none"


@dataclass(frozen=True, slots=True)
class SuiteModel:
    """A model as its figures name it: `S`, or `S:q4_0` for another format than float32.

    A format is a quantization of the engine, or a type of the tensors of a GGUF file.
    """

    name: str
    base: str
    weight_format: str

    @classmethod
    def parse(cls, name: str) -> SuiteModel:
        """Raises INVALID_ARGUMENT for an unknown model or format."""
        base, _, chosen = name.partition(":")
        if base not in (DEMO, *PRESETS):
            raise errors.invalid("models", f"must be one of {', '.join((DEMO, *PRESETS))}", base)
        known = (*QUANTIZATIONS, *WRITTEN)
        if ":" in name and chosen not in known:
            raise errors.invalid("models", f"the format of {base} must be one of {', '.join(known)}", chosen)
        return cls(name, base, chosen or _FULL)

    @property
    def quantization(self) -> Quantization:
        return next((kind for kind in QUANTIZATIONS if kind == self.weight_format), _FULL)

    def write(self, directory: Path) -> Path:
        """Returns the model's directory or file, which it writes if it is missing.

        Raises FAILED_PRECONDITION if it cannot be written in this format.
        """
        checkpoint = DEMO_DIR if self.base == DEMO else directory / self.base
        if not checkpoint.exists():
            synthesize(checkpoint, Recipe("llama", PRESETS[self.base], "float32", 0, 1))
        if self.weight_format in QUANTIZATIONS:
            return checkpoint
        path = directory / f"{self.base}-{self.weight_format}.gguf"
        try:
            to_file(checkpoint, path, WRITTEN[self.weight_format], io.StringIO(), force=True)
        except ModelRefused as refusal:
            raise errors.failed_precondition("MODEL_INVALID", f"{self.name}: {refusal}") from refusal
        return path
