"""What `auto` chooses for: the matrices of one product, which get one format.

They share their inputs (queries, keys and values; gate and up), and other engines fuse them.

Legend: O outputs, I inputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from ryzanstein.tools.quantize.job import QuantizeJob
from ryzanstein.tools.quantize.methods.grids import GridMatrix, fitted
from ryzanstein.tools.quantize.methods.one_layer import module_of
from ryzanstein.tools.quantize.reading.layouts import LayoutScheme, restored
from ryzanstein.tools.quantize.upgrades import EIGHT, FLOATS, LOW, UpgradeProduct

QuantizedMatrices = dict[str, tuple[GridMatrix, LayoutScheme]]


@dataclass(frozen=True, slots=True)
class Unit:
    """The matrices of a product in layer `layer`, by name with their shapes, and the noise that each format adds."""

    layer: int
    shapes: Mapping[str, tuple[int, int]]
    noises: tuple[float, float]

    def to_state(self) -> dict[str, Any]:
        return {"layer": self.layer, "shapes": self.shapes, "noises": self.noises}

    @classmethod
    def from_state(cls, kept: Mapping[str, Any]) -> Unit:
        shapes = {name: (outputs, inputs) for name, (outputs, inputs) in kept["shapes"].items()}
        return cls(kept["layer"], shapes, (kept["noises"][0], kept["noises"][1]))

    def product(self, job: QuantizeJob) -> UpgradeProduct:
        def num_bytes(kind: int) -> int:
            return sum(scheme_of(job, name, shape[1], kind).num_bytes(*shape) for name, shape in self.shapes.items())

        floats = sum(outputs * inputs * job.origin.dtypes[name].itemsize for name, (outputs, inputs) in self.shapes.items())
        return UpgradeProduct(self.noises, (num_bytes(LOW), num_bytes(EIGHT), floats))


def scheme_of(job: QuantizeJob, name: str, num_inputs: int, kind: int) -> LayoutScheme:
    """Returns the scheme of a matrix that has one."""
    grid = job.schemes.grid(num_inputs, job.origin.dtypes[name], 8 if kind == EIGHT else None)
    assert grid is not None, "units have a group"
    return LayoutScheme(grid)


def eight_bits(job: QuantizeJob, name: str, weight_OI: Tensor) -> GridMatrix:
    return fitted(weight_OI, scheme_of(job, name, weight_OI.shape[1], EIGHT).grid)


def candidates_file(job: QuantizeJob, index: int) -> Path:
    """The file that has a layer's matrices in few bits."""
    return job.partial.path / f"candidates-{index}.safetensors"


def quantized_matrices(job: QuantizeJob, index: int, units: Sequence[Unit], formats: Sequence[int]) -> QuantizedMatrices:
    """Returns a layer's matrices that do not stay floats."""
    candidates, found = job.partial.load(candidates_file(job, index)), QuantizedMatrices()
    for unit, kind in zip(units, formats, strict=True):
        if unit.layer != index or kind == FLOATS:
            continue
        for name, shape in unit.shapes.items():
            scheme = scheme_of(job, name, shape[1], kind)
            if kind == LOW:
                found[name] = restored(module_of(name), candidates, scheme), scheme
            else:
                found[name] = eight_bits(job, name, job.origin.floats(name)), scheme
    return found
