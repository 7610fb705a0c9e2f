"""Grids of integers, and matrices on them: levels times a scale for each group of inputs.

Legend: O outputs, I inputs, G groups of g inputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_CLIPPED = (0.93, 1.0, 1.07, 1.14, 1.21, 1.3, 1.4, 1.5, 1.6)
"""How far a scale is below the one that represents the largest weight with half a level to spare."""
_MIN_GROUP = 16


@dataclass(frozen=True, slots=True)
class Grid:
    """Levels of `bits` bits, a scale of `scale_dtype` for `group` inputs; None: for all of an output.

    `zero_points`: a level other than 0 stands for zero, another one in each group.
    """

    bits: int
    group: int | None
    zero_points: bool = False
    scale_dtype: torch.dtype = torch.bfloat16

    @property
    def lowest(self) -> int:
        return -(1 << (self.bits - 1))

    @property
    def highest(self) -> int:
        return (1 << (self.bits - 1)) - 1


@dataclass(frozen=True, slots=True)
class GridMatrix:
    """A matrix on a grid: (level - zero) * scale, with all scales of an output in one row."""

    levels_OI: Tensor  # int8
    scale_OG: Tensor
    zero_OG: Tensor | None  # int8

    def floats(self) -> Tensor:
        """Returns the numbers, [O, I] in float32."""
        num_outputs, num_groups = self.scale_OG.shape
        levels_OGg = self.levels_OI.view(num_outputs, num_groups, -1).float()
        if self.zero_OG is not None:
            levels_OGg = levels_OGg - self.zero_OG.unsqueeze(-1)
        return (levels_OGg * self.scale_OG.float().unsqueeze(-1)).view(self.levels_OI.shape)


def group_for(num_inputs: int, group: int) -> int | None:
    """Returns `group`, or its largest half, quarter .. of at least 16 that divides the inputs; None if none does."""
    while group >= _MIN_GROUP:
        if num_inputs % group == 0:
            return group
        group //= 2
    return None


def fitted(weight_OI: Tensor, grid: Grid, importance_I: Tensor | None = None, *, searched: bool = True) -> GridMatrix:
    """Returns the matrix rounded to nearest.

    Each scale has the least squared error of several that clip more or less, if `searched`; errors
    are weighted by `importance_I`. With 8 bits nothing is gained by clipping.
    """
    num_outputs, num_inputs = weight_OI.shape
    group = grid.group or num_inputs
    weight_OGg = weight_OI.view(num_outputs, num_inputs // group, group)
    importance_Gg = None if importance_I is None else importance_I.view(-1, group)
    scale_OG, zero_OG = fitted_scales(weight_OGg, grid, importance_Gg, searched=searched)
    levels_OGg = on_grid(weight_OGg, scale_OG.unsqueeze(-1), None if zero_OG is None else zero_OG.unsqueeze(-1), grid)
    zeros = None if zero_OG is None else zero_OG.to(torch.int8)
    return GridMatrix(levels_OGg.view(weight_OI.shape).to(torch.int8), scale_OG.to(grid.scale_dtype), zeros)


def fitted_scales(
    weight_OGg: Tensor, grid: Grid, importance_Gg: Tensor | None, *, searched: bool = True
) -> tuple[Tensor, Tensor | None]:
    """Returns scales and zero points, [O, G] each in float32, with values that the stored dtype has."""
    factors = _CLIPPED if searched and grid.bits < 8 else (1.0,)
    best_error, best_scale, best_zero = None, None, None
    for factor in factors:
        scale_OG1, zero_OG1 = (_between if grid.zero_points else _around)(weight_OGg, grid, factor)
        off_OGg = on_grid(weight_OGg, scale_OG1, zero_OG1, grid)
        off_OGg = off_OGg.sub_(0 if zero_OG1 is None else zero_OG1).mul_(scale_OG1).sub_(weight_OGg).square_()
        error_OG1 = (off_OGg if importance_Gg is None else off_OGg.mul_(importance_Gg)).sum(dim=-1, keepdim=True)
        if best_error is None or best_scale is None:
            best_error, best_scale, best_zero = error_OG1, scale_OG1, zero_OG1
            continue
        better = error_OG1 < best_error
        best_error, best_scale = torch.where(better, error_OG1, best_error), torch.where(better, scale_OG1, best_scale)
        if best_zero is not None and zero_OG1 is not None:
            best_zero = torch.where(better, zero_OG1, best_zero)
    assert best_scale is not None, "there is at least one factor"
    return best_scale.squeeze(-1), None if best_zero is None else best_zero.squeeze(-1)


def on_grid(weight: Tensor, scale: Tensor, zero: Tensor | None, grid: Grid) -> Tensor:
    """Returns the nearest levels, as floats."""
    levels = (weight / scale).add_(0 if zero is None else zero).round_()
    return levels.clamp_(grid.lowest, grid.highest)


def _around(weight_OGg: Tensor, grid: Grid, factor: float) -> tuple[Tensor, None]:
    """Returns the scale of a symmetric grid. The lowest level has no opposite: half a level is lost or won."""
    spare = 0.5 if grid.bits < 8 else 0.0
    return _stored(weight_OGg.abs().amax(dim=-1, keepdim=True) / ((grid.highest + spare) * factor), grid), None


def _between(weight_OGg: Tensor, grid: Grid, factor: float) -> tuple[Tensor, Tensor]:
    """Returns scale and zero point of a grid between the extremes, which include zero."""
    high = weight_OGg.amax(dim=-1, keepdim=True).clamp_min_(0)
    low = weight_OGg.amin(dim=-1, keepdim=True).clamp_max_(0)
    scale = _stored((high - low) / ((grid.highest - grid.lowest) * factor), grid)
    middle = (low + high) / 2
    zero = ((grid.lowest + grid.highest) / 2 - middle / scale).round_()
    return scale, zero.clamp_(grid.lowest, grid.highest)


def _stored(scale: Tensor, grid: Grid) -> Tensor:
    """Rounds scales as they will be stored. A group of zeros may have any scale but zero."""
    scale = scale.to(grid.scale_dtype).float()
    return torch.where(scale > 0, scale, 1.0)
