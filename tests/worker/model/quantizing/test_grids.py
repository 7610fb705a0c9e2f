"""Grids: what rounding to them may cost, and that searching scales costs less."""

import pytest
import torch

from ryzanstein.tools.quantize.methods.grids import Grid, fitted, group_for


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("zero_points", [False, True])
def test_an_unclipped_weight_is_off_by_half_a_step(bits: int, zero_points: bool) -> None:
    weight_OI = torch.randn(24, 96) + (0.5 if zero_points else 0.0)
    matrix = fitted(weight_OI, Grid(bits, 32, zero_points, torch.float32), searched=False)
    step_OI = matrix.scale_OG.repeat_interleave(32, dim=1)
    clipped_OI = (matrix.levels_OI == -(2 ** (bits - 1))) | (matrix.levels_OI == 2 ** (bits - 1) - 1)
    off_OI = (matrix.floats() - weight_OI).abs()
    assert (off_OI[~clipped_OI] <= 0.5001 * step_OI[~clipped_OI]).all()
    assert (off_OI <= 1.01 * step_OI).all()
    assert clipped_OI.float().mean() < 0.1


@pytest.mark.parametrize("zero_points", [False, True])
def test_searched_scales_are_better_in_every_group(zero_points: bool) -> None:
    weight_OI = torch.randn(64, 256)
    grid = Grid(4, 32, zero_points)

    def errors(searched: bool) -> torch.Tensor:
        off_OI = fitted(weight_OI, grid, searched=searched).floats() - weight_OI
        return off_OI.square().view(64, 8, 32).sum(dim=2)

    plain, best = errors(False), errors(True)
    assert (best <= plain * 1.0001).all()
    assert best.mean() < 0.96 * plain.mean()


def test_errors_are_weighted_by_importance() -> None:
    weight_OI, importance_I = torch.randn(32, 64), torch.rand(64).pow(4)
    weighted, plain = (
        ((fitted(weight_OI, Grid(4, 32), importance).floats() - weight_OI).square() * importance_I).sum()
        for importance in (importance_I, None)
    )
    assert weighted < plain


def test_a_group_of_zeros_stays_zero() -> None:
    assert torch.equal(fitted(torch.zeros(4, 32), Grid(4, 32)).floats(), torch.zeros(4, 32))


def test_weights_of_any_size_stay_finite() -> None:
    weight_OI = torch.randn(8, 32) * torch.tensor([1e-42, 1e-30, 1e-8, 1, 1e4, 1e20, 1e30, 1e37]).unsqueeze(1)
    assert fitted(weight_OI, Grid(4, 32)).floats().isfinite().all()


@pytest.mark.parametrize(
    ("num_inputs", "group", "expected"),
    [(640, 128, 128), (96, 128, 32), (48, 32, 16), (40, 32, None), (7, 128, None), (16, 16, 16)],
)
def test_a_group_divides_the_inputs(num_inputs: int, group: int, expected: int | None) -> None:
    assert group_for(num_inputs, group) == expected
