"""GPTQ against the optimal brain quantizer that it speeds up, and against rounding to nearest."""

import pytest
import torch
from torch import Tensor

from ryzanstein.tools.quantize.methods.gptq import gptq
from ryzanstein.tools.quantize.methods.grids import Grid, GridMatrix, fitted, on_grid


def correlated(num_rows: int, num_inputs: int) -> Tensor:
    mixed_TI = torch.randn(num_rows, num_inputs) @ torch.randn(num_inputs, num_inputs)
    return mixed_TI + 3 * torch.randn(num_rows, 1)


def error(matrix: GridMatrix, weight_OI: Tensor, x_TI: Tensor) -> float:
    return (x_TI @ (matrix.floats() - weight_OI).t()).square().mean().item()


def by_elimination(weight_OI: Tensor, hessian_II: Tensor, scale_O: Tensor, grid: Grid) -> Tensor:
    """Rounds input after input, each time with the inverse Hessian of the inputs that are left (equation 2 of the paper)."""
    num_inputs = weight_OI.shape[1]
    damped_II = hessian_II.double() + 0.01 * hessian_II.diagonal().double().mean() * torch.eye(num_inputs, dtype=torch.float64)
    rest_OI, levels_OI = weight_OI.double().clone(), torch.zeros_like(weight_OI)
    for column in range(num_inputs):
        inverse = torch.linalg.inv(damped_II[column:, column:])
        levels_OI[:, column] = on_grid(rest_OI[:, column].float(), scale_O, None, grid)
        off_O = rest_OI[:, column] - levels_OI[:, column] * scale_O
        rest_OI[:, column:] -= off_O.unsqueeze(1) * inverse[0] / inverse[0, 0]
    return levels_OI


def test_the_levels_are_those_of_elimination() -> None:
    torch.manual_seed(1)
    x_TI, weight_OI, grid = correlated(400, 48), torch.randn(16, 48), Grid(4, None, scale_dtype=torch.float32)
    matrix = gptq(weight_OI, x_TI.t() @ x_TI, grid)
    expected_OI = by_elimination(weight_OI, x_TI.t() @ x_TI, matrix.scale_OG[:, 0], grid)
    assert (matrix.levels_OI == expected_OI).float().mean() > 0.99  # float32 may round a tie the other way


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("zero_points", [False, True])
@pytest.mark.parametrize("group", [None, 32])
def test_outputs_are_closer_than_with_rounding_to_nearest(act_order: bool, zero_points: bool, group: int | None) -> None:
    torch.manual_seed(2)
    x_TI, weight_OI, grid = correlated(600, 128), torch.randn(32, 128), Grid(4, group, zero_points)
    matrix = gptq(weight_OI, x_TI.t() @ x_TI, grid, act_order=act_order)
    assert error(matrix, weight_OI, x_TI) < 0.6 * error(fitted(weight_OI, grid), weight_OI, x_TI)
    assert (matrix.zero_OG is not None) == zero_points


def test_inputs_that_are_always_zero_and_fewer_rows_than_inputs() -> None:
    x_TI, weight_OI = correlated(20, 64), torch.randn(8, 64)
    x_TI[:, 10:20] = 0
    matrix = gptq(weight_OI, x_TI.t() @ x_TI, Grid(4, 32))
    assert matrix.floats().isfinite().all()
    assert (matrix.floats() - weight_OI)[:, 10:20].abs().max() < 1
    assert error(matrix, weight_OI, x_TI) < error(fitted(weight_OI, Grid(4, 32)), weight_OI, x_TI)


def test_one_input_of_a_few_is_not_damped_away() -> None:
    x_TI, weight_OI = torch.randn(100, 16) * 1e-6, torch.randn(4, 16)
    matrix = gptq(weight_OI, x_TI.t() @ x_TI, Grid(8, 16))
    assert (matrix.floats() - weight_OI).abs().max() < 0.05
