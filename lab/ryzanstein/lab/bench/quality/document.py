"""The document that `ryzanstein bench quality` writes, and continues if it was interrupted.

It has sums for each window, so that every figure of a report, error bars included, comes from it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from ryzanstein import errors

SCHEMA = "ryzanstein.bench.quality/1"
_MAX_BYTES = 64 * 2**20
Count = Annotated[int, Meta(ge=0)]


class WindowSums(msgspec.Struct, frozen=True, array_like=True):
    """Sums over the scored tokens of one window.

    `loss` is the negative log probability of the tokens and `divergence` the Kullback-Leibler
    divergence from the reference's distributions, in nats. `same` counts the positions at which the
    likeliest token is the reference's.
    """

    num_tokens: Annotated[int, Meta(ge=1)]
    loss: float
    divergence: float
    same: Count


class GreedyMatch(msgspec.Struct, frozen=True, array_like=True):
    """One greedy answer of the reference, read by another model.

    `until_different` tokens are equal from the beginning on; `same` are the likeliest after the
    reference's own tokens before them.
    """

    until_different: Count
    same: Count


class QualityText(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A text: where it is from, and a digest of its token ids."""

    name: str
    source: str
    digest: str


class QualitySettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What every row was measured with. Rows of other settings are not compared."""

    reference: str
    texts: list[QualityText]
    num_tokens: int
    window: int
    prompts: int
    prompt_tokens: int
    new_tokens: int
    prefill_tokens: int
    threads: int
    rounds: int


class QualityRow(msgspec.Struct, forbid_unknown_fields=True):
    """One model in one format under one engine.

    `model` and `files` identify it: a path, and the sizes and times of its files. `texts` has the
    windows of each text. `prefill_s` and `decode_s` are seconds per token, one of each per round.
    """

    name: str
    engine: str
    quantization: str
    model: str
    files: str
    memory_bytes: Count
    file_bytes: Count
    texts: dict[str, list[WindowSums]] = {}
    greedy: list[GreedyMatch] = []
    prefill_s: list[float] = []
    decode_s: list[float] = []

    def is_of(self, other: QualityRow) -> bool:
        """Returns whether the other is a row of the same files in the same format."""
        return (self.engine, self.quantization, self.model, self.files) == (
            other.engine,
            other.quantization,
            other.model,
            other.files,
        )


class QualityMachine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where it was measured, and the load (1 minute) at the end of each turn of measurements."""

    cpu: str
    cores: int
    commit: str
    loads: list[float]


class QualityDocument(msgspec.Struct, forbid_unknown_fields=True):
    """All rows of a run. `failed` has the reason for each row that could not be measured."""

    schema: str
    machine: QualityMachine
    settings: QualitySettings
    rows: list[QualityRow]
    failed: dict[str, str] = {}

    @property
    def reference(self) -> QualityRow:
        return next(row for row in self.rows if row.name == self.settings.reference)


def read_quality(path: Path) -> QualityDocument:
    """Reads a document. Raises INVALID_ARGUMENT with the file, and the field that is wrong."""
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise errors.invalid(str(path), f"must have at most {_MAX_BYTES} bytes", path.stat().st_size)
        document = msgspec.json.decode(path.read_bytes(), type=QualityDocument)
    except (OSError, msgspec.DecodeError) as error:  # includes ValidationError, which names the field
        raise errors.invalid(str(path), str(error)) from error
    if document.schema != SCHEMA:
        raise errors.invalid(f"{path}: schema", f"must be {SCHEMA}", document.schema)
    return document
