"""GPTQ (Frantar et al. 2022): rounds input after input and corrects the weights that are not rounded yet.

Legend: O outputs, I inputs, B inputs of a block, G groups.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ryzanstein.tools.quantize.methods.grids import Grid, GridMatrix, fitted_scales, on_grid

_BLOCK = 128
_DAMPING = 0.01


def gptq(weight_OI: Tensor, hessian_II: Tensor, grid: Grid, *, act_order: bool = False) -> GridMatrix:
    """Returns the matrix on the grid with a small error of its outputs for inputs with sum x^T x `hessian_II`.

    `act_order` rounds the inputs with the largest activations first. The scales are then fixed
    before, so that groups remain groups of neighbours.
    """
    num_outputs, num_inputs = weight_OI.shape
    group = grid.group or num_inputs
    order_I = torch.arange(num_inputs)
    if act_order:
        order_I = hessian_II.diagonal().argsort(descending=True, stable=True)
    upper_II = _inverse_factor(hessian_II[order_I][:, order_I])
    scales = _Scales(weight_OI, hessian_II.diagonal(), grid, group)
    rest_OI = weight_OI[:, order_I].clone()
    levels_OI = torch.empty(num_outputs, num_inputs, dtype=torch.int8)
    # Without an order each group is a block: its scales are fitted when all earlier inputs have been corrected for.
    fixed = act_order or grid.group is None
    block = _BLOCK if fixed else group
    if fixed:
        scales.fit_all()
    for first in range(0, num_inputs, block):
        columns = slice(first, min(first + block, num_inputs))
        if not fixed:
            scales.fit(first // group, rest_OI[:, columns])
        errors_OB = _round_block(rest_OI[:, columns], upper_II[columns, columns], order_I[columns], scales, levels_OI)
        rest_OI[:, columns.stop :].sub_(errors_OB @ upper_II[columns, columns.stop :])
    return scales.matrix(levels_OI)


class _Scales:
    """Scales and zero points of all groups, filled in group after group or at once."""

    def __init__(self, weight_OI: Tensor, importance_I: Tensor, grid: Grid, group: int) -> None:
        self._weight_OI, self._importance_Gg, self.grid, self.group = weight_OI, importance_I.view(-1, group), grid, group
        self.scale_OG = torch.ones(len(weight_OI), weight_OI.shape[1] // group)
        self.zero_OG = torch.zeros_like(self.scale_OG) if grid.zero_points else None

    def fit_all(self) -> None:
        weight_OGg = self._weight_OI.view(len(self._weight_OI), -1, self.group)
        self._keep(slice(None), *fitted_scales(weight_OGg, self.grid, self._importance_Gg))

    def fit(self, index: int, weight_Og: Tensor) -> None:
        where = slice(index, index + 1)
        self._keep(where, *fitted_scales(weight_Og.unsqueeze(1), self.grid, self._importance_Gg[where]))

    def _keep(self, where: slice, scale_OG: Tensor, zero_OG: Tensor | None) -> None:
        self.scale_OG[:, where] = scale_OG
        if self.zero_OG is not None and zero_OG is not None:
            self.zero_OG[:, where] = zero_OG

    def matrix(self, levels_OI: Tensor) -> GridMatrix:
        zeros = None if self.zero_OG is None else self.zero_OG.to(torch.int8)
        return GridMatrix(levels_OI, self.scale_OG.to(self.grid.scale_dtype), zeros)


def _round_block(weight_OB: Tensor, upper_BB: Tensor, inputs_B: Tensor, scales: _Scales, levels_OI: Tensor) -> Tensor:
    """Rounds a block and returns its errors [O, B], each divided by its input's number in the factor."""
    errors_OB = torch.empty_like(weight_OB)
    for column, number in enumerate(inputs_B.tolist()):
        group = number // scales.group
        scale_O = scales.scale_OG[:, group]
        zero_O = None if scales.zero_OG is None else scales.zero_OG[:, group]
        rounded_O = on_grid(weight_OB[:, column], scale_O, zero_O, scales.grid)
        levels_OI[:, number] = rounded_O
        rounded_O = rounded_O.sub_(0 if zero_O is None else zero_O).mul_(scale_O)
        error_O = (weight_OB[:, column] - rounded_O) / upper_BB[column, column]
        weight_OB[:, column + 1 :].addr_(error_O, upper_BB[column, column + 1 :], alpha=-1)
        errors_OB[:, column] = error_O
    return errors_OB


def _inverse_factor(hessian_II: Tensor) -> Tensor:
    """Returns the upper Cholesky factor of the inverse, damped as much as it needs to exist.

    An input that was always zero has no error: a diagonal of one keeps it apart.
    """
    diagonal_I = hessian_II.diagonal().clone()
    diagonal_I[diagonal_I == 0] = 1
    step_I = _DAMPING * diagonal_I.mean()
    for tenfold in range(5):
        damped_II = hessian_II.clone()
        damped_II.diagonal().copy_(diagonal_I + step_I * 10**tenfold)
        lower_II, failed = torch.linalg.cholesky_ex(damped_II)
        if failed:
            continue
        upper_II, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower_II), upper=True)
        if not failed:
            factor_II: Tensor = upper_II
            return factor_II
    raise ArithmeticError("the Hessian of its inputs has no Cholesky factor")
