"""Ternary matrices (BitNet b1.58)."""

import torch

from ryzanstein.worker.model.quantizing.ternary import is_ternary, ternary


def test_a_ternary_matrix_is_kept_exactly() -> None:
    weight_OI = torch.randint(-1, 2, (12, 40)).float() * 0.037
    assert is_ternary(weight_OI)
    torch.testing.assert_close(ternary(weight_OI).floats(), weight_OI)


def test_others_are_rounded_by_their_mean_magnitude() -> None:
    weight_OI = torch.randn(16, 64)
    mean = weight_OI.abs().mean()
    assert not is_ternary(weight_OI)
    torch.testing.assert_close(ternary(weight_OI).floats(), (weight_OI / mean).round().clamp(-1, 1) * mean)


def test_zeros() -> None:
    assert torch.equal(ternary(torch.zeros(4, 8)).floats(), torch.zeros(4, 8))
