"""How quantized matrices are stored: compressed-tensors' layouts, and BitNet's for ternary ones.

pack-quantized: levels of 4 or 8 bits in int32, lowest bits first, offset to be unsigned; int-quantized:
int8 as they are (https://github.com/neuralmagic/compressed-tensors). bitnet: four ternary levels in a
byte, of rows a quarter of the matrix apart, as transformers packs them.

Legend: O outputs, I inputs, G groups.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ryzanstein.tools.quantize.methods.grids import Grid, GridMatrix

_WORD_BITS = 32
_TERNARY_ROWS = 4


@dataclass(frozen=True, slots=True)
class LayoutScheme:
    """How a matrix is stored. `rounds_inputs`: its inputs are rounded to 8 bits as well."""

    grid: Grid
    rounds_inputs: bool = False
    ternary: bool = False

    @property
    def layout(self) -> str:
        return "int-quantized" if self.rounds_inputs else "pack-quantized"

    def num_bytes(self, num_outputs: int, num_inputs: int) -> int:
        """Returns the stored bytes of a matrix."""
        if self.ternary:
            return num_outputs * num_inputs // _TERNARY_ROWS
        num_groups = 1 if self.grid.group is None else num_inputs // self.grid.group
        scale_bits = 8 * self.grid.scale_dtype.itemsize + (self.grid.bits if self.grid.zero_points else 0)
        return num_outputs * (num_inputs * self.grid.bits + num_groups * scale_bits) // 8

    def __str__(self) -> str:
        if self.ternary:
            return "ternary"
        if self.rounds_inputs:
            return "8 bits, inputs too"
        return f"{self.grid.bits} bits, groups of {self.grid.group}{' with zero points' if self.grid.zero_points else ''}"


def stored(module: str, matrix: GridMatrix, scheme: LayoutScheme) -> dict[str, Tensor]:
    """Returns the tensors of a matrix. `module` is its name without `.weight`."""
    if scheme.ternary:
        return {f"{module}.weight": packed_ternary(matrix.levels_OI), f"{module}.weight_scale": matrix.scale_OG[:1].view(1)}
    if scheme.layout == "int-quantized":
        return {f"{module}.weight": matrix.levels_OI, f"{module}.weight_scale": matrix.scale_OG}
    tensors = {
        f"{module}.weight_packed": packed(matrix.levels_OI, scheme.grid.bits),
        f"{module}.weight_scale": matrix.scale_OG,
        f"{module}.weight_shape": torch.tensor(matrix.levels_OI.shape),
    }
    if matrix.zero_OG is not None:
        tensors[f"{module}.weight_zero_point"] = packed(matrix.zero_OG.t(), scheme.grid.bits).t().contiguous()
    return tensors


def restored(module: str, tensors: Mapping[str, Tensor], scheme: LayoutScheme) -> GridMatrix:
    """Returns the matrix of which `stored` made pack-quantized tensors."""
    scale_OG, bits = tensors[f"{module}.weight_scale"], scheme.grid.bits
    num_outputs, num_inputs = tensors[f"{module}.weight_shape"].tolist()
    levels_OI = _unpacked(tensors[f"{module}.weight_packed"], bits)[:, :num_inputs]
    zero_GO = tensors.get(f"{module}.weight_zero_point")
    zero_OG = None if zero_GO is None else _unpacked(zero_GO.t(), bits)[:, :num_outputs].t()
    return GridMatrix(levels_OI, scale_OG, zero_OG)


def packed(levels_OI: Tensor, bits: int) -> Tensor:
    """Packs signed levels along their rows. A row is filled up with zero bits."""
    per_word = _WORD_BITS // bits
    unsigned_OI = levels_OI.long() + (1 << (bits - 1))
    unsigned_OI = torch.nn.functional.pad(unsigned_OI, (0, -unsigned_OI.shape[1] % per_word))
    shifts = torch.arange(per_word) * bits
    return (unsigned_OI.view(len(levels_OI), -1, per_word) << shifts).sum(dim=-1).to(torch.int32)


def _unpacked(words: Tensor, bits: int) -> Tensor:
    shifts = torch.arange(_WORD_BITS // bits) * bits
    unsigned: Tensor = (words.long().unsqueeze(-1) >> shifts) & ((1 << bits) - 1)
    return (unsigned.flatten(-2) - (1 << (bits - 1))).to(torch.int8)


def packed_ternary(levels_OI: Tensor) -> Tensor:
    """Packs levels -1, 0, 1. The number of outputs is a multiple of four."""
    quarters: Tensor = (levels_OI + 1).view(_TERNARY_ROWS, -1, levels_OI.shape[1]).to(torch.uint8)
    shifts = torch.arange(0, 2 * _TERNARY_ROWS, 2, dtype=torch.uint8).view(-1, 1, 1)
    return (quarters << shifts).sum(dim=0, dtype=torch.uint8)


def quantization_config(schemes: Mapping[str, LayoutScheme], ignored: Sequence[str]) -> dict[str, Any]:
    """Returns config.json's `quantization_config` of modules with these schemes. `ignored` stay floats."""
    if any(scheme.ternary for scheme in schemes.values()):
        return {
            "quant_method": "bitnet",
            "linear_class": "autobitlinear",
            "quantization_mode": "offline",
            "modules_to_not_convert": list(ignored),
        }
    groups: dict[LayoutScheme, list[str]] = {}
    for module, scheme in schemes.items():
        groups.setdefault(scheme, []).append(module)
    layouts = {scheme.layout for scheme in groups}
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": layouts.pop() if len(layouts) == 1 else "mixed-precision",
        "config_groups": {f"group_{index}": _group(scheme, modules) for index, (scheme, modules) in enumerate(groups.items())},
        "ignore": list(ignored),
        "kv_cache_scheme": None,
    }


def _group(scheme: LayoutScheme, modules: list[str]) -> dict[str, Any]:
    grid = scheme.grid
    inputs = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    return {
        "targets": modules,
        "format": scheme.layout,
        "weights": {
            "num_bits": grid.bits,
            "type": "int",
            "symmetric": not grid.zero_points,
            "strategy": "channel" if grid.group is None else "group",
            "group_size": grid.group,
            "dynamic": False,
        },
        "input_activations": inputs if scheme.rounds_inputs else None,
        "output_activations": None,
    }
