"""The document that `ryzanstein bench suite` writes and `ryzanstein bench compare` reads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from ryzanstein import errors
from ryzanstein.lab.bench.engine.reference_ceilings import Ceilings
from ryzanstein.lab.bench.engine.suite.machine import SuiteMachine

SCHEMA = "ryzanstein.bench.suite/1"
MAX_ROUNDS = 100
_MAX_BYTES = 64 * 2**20
Positive = Annotated[float, Meta(gt=0)]


class SuiteSample(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One round of one figure: its time, its reference kernel's time, and the ratio of both."""

    seconds: Positive
    reference_s: Positive
    ratio: Positive

    @classmethod
    def of(cls, seconds: float, before_s: float, after_s: float) -> SuiteSample:
        """Returns a sample. The kernel was timed right before and right after.

        Its time in between is taken as the geometric mean of both.
        """
        reference_s = math.sqrt(before_s * after_s)
        return cls(seconds, reference_s, seconds / reference_s)


class SuiteFigure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What was timed: more seconds is worse for every figure.

    `workload` describes what the seconds are of.
    """

    name: str
    workload: str
    reference: str
    rounds: Annotated[list[SuiteSample], Meta(min_length=1, max_length=MAX_ROUNDS)]

    @property
    def ratios(self) -> list[float]:
        return [sample.ratio for sample in self.rounds]

    @property
    def seconds(self) -> list[float]:
        return [sample.seconds for sample in self.rounds]


class KernelTimes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A reference kernel, and its time at the beginning of each round."""

    definition: str
    rounds_s: Annotated[list[Positive], Meta(min_length=1, max_length=MAX_ROUNDS)]


class SuiteDocument(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One run of the suite. `kernels` are the reference kernels by name."""

    schema: str
    machine: SuiteMachine
    ceilings: list[Ceilings]
    kernels: dict[str, KernelTimes]
    figures: Annotated[list[SuiteFigure], Meta(min_length=1, max_length=1000)]


def read_document(path: Path) -> SuiteDocument:
    """Reads a document.

    Raises INVALID_ARGUMENT with the file and the field that is missing, of a wrong type or out of
    bounds.
    """
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise errors.invalid(str(path), f"must have at most {_MAX_BYTES} bytes", path.stat().st_size)
        text = path.read_bytes()
        schema = msgspec.json.decode(text, type=_Head).schema
        if schema != SCHEMA:
            raise errors.invalid(f"{path}: schema", f"must be {SCHEMA}", schema)
        document = msgspec.json.decode(text, type=SuiteDocument)
    except (OSError, msgspec.DecodeError) as error:  # includes ValidationError, which names the field
        raise errors.invalid(str(path), str(error)) from error
    _refuse_twins(path, document.figures)
    return document


class _Head(msgspec.Struct):
    """The field that determines how to read the others."""

    schema: str


def _refuse_twins(path: Path, figures: Sequence[SuiteFigure]) -> None:
    names = [figure.name for figure in figures]
    twin = next((name for i, name in enumerate(names) if name in names[:i]), None)
    if twin is not None:
        raise errors.invalid(f"{path}: figures", "must have each name once", twin)
