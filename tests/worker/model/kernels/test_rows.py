"""Norms, gates and quantized rows against float64 and against torch, with numbers that are none."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ryzanstein.worker.kernels.native import NativeKernels
from ryzanstein.worker.products.int8 import quantize_rows

WIDTHS = (1, 15, 16, 48, 250, 2048)
SPECIAL = (torch.nan, torch.inf, -torch.inf)


def exact_norm(x_TE: Tensor, weight_E: Tensor, eps: float, offset: float) -> Tensor:
    x_TE, weight_E = x_TE.double(), weight_E.double()
    return x_TE / (x_TE.square().mean(-1, keepdim=True) + eps).sqrt() * (offset + weight_E)


@pytest.mark.parametrize("offset", [0.0, 1.0], ids=["weight", "one more"])
@pytest.mark.parametrize("width", WIDTHS)
def test_a_norm_is_that_of_float64(kernels: NativeKernels, normal: Callable[..., Tensor], width: int, offset: float) -> None:
    x_TE, weight_E = normal(1, 9, width) * 3, normal(2, width)
    out_TE = kernels.rows.rms_norm(x_TE, weight_E, 1e-6, offset)
    torch.testing.assert_close(out_TE.double(), exact_norm(x_TE, weight_E, 1e-6, offset), rtol=2e-6, atol=1e-7)


def test_a_norm_takes_any_shape_and_stride_and_leaves_its_input(kernels: NativeKernels, normal: Callable[..., Tensor]) -> None:
    wide_THE, weight_E = normal(1, 5, 3, 96), normal(2, 48)
    x_THE, before_THE = wide_THE[..., 20:68], wide_THE.clone()
    out_THE = kernels.rows.rms_norm(x_THE, weight_E, 1e-5, 0.0)
    torch.testing.assert_close(out_THE.double(), exact_norm(x_THE, weight_E, 1e-5, 0.0), rtol=2e-6, atol=1e-7)
    assert torch.equal(wide_THE, before_THE)


def test_a_norm_of_zeros_is_zero_and_eps_counts(kernels: NativeKernels) -> None:
    weight_E = torch.full((16,), 2.0)
    assert torch.equal(kernels.rows.rms_norm(torch.zeros(2, 16), weight_E, 1e-6, 0.0), torch.zeros(2, 16))
    assert torch.equal(kernels.rows.rms_norm(torch.full((1, 16), 0.5), weight_E, 0.75, 0.0), torch.ones(1, 16))


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("width", WIDTHS)
def test_activations_and_gates_are_those_of_float64(
    kernels: NativeKernels, normal: Callable[..., Tensor], width: int, name: str
) -> None:
    gate_up_T2E = normal(1, 7, 2 * width) * 4
    gate_TE, up_TE = gate_up_T2E.double().chunk(2, dim=-1)
    exact_TE = ACTIVATIONS[name](gate_TE)
    torch.testing.assert_close(kernels.rows.activate_gate(gate_up_T2E, name).double(), exact_TE * up_TE, rtol=2e-6, atol=2e-6)
    gate_TE = gate_up_T2E[:, :width].contiguous()
    torch.testing.assert_close(kernels.rows.activate(gate_TE, name).double(), exact_TE, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("interleaved", [False, True])
def test_angles_are_those_of_float64(kernels: NativeKernels, interleaved: bool) -> None:
    positions_T, frequencies_R = torch.tensor([0, 1, 500, 131_071]), torch.logspace(0, -4, 8).repeat(2)
    cos_T1R, sin_T1R = kernels.rotation.angles(positions_T, frequencies_R, interleaved, 1.5)
    angles_TR = (positions_T.float().unsqueeze(1) * frequencies_R).double()
    sign_R = torch.ones(16)
    sign_R[torch.arange(0, 16, 2) if interleaved else torch.arange(8)] = -1
    torch.testing.assert_close(cos_T1R[:, 0].double(), angles_TR.cos() * 1.5, rtol=1e-6, atol=2e-7)
    torch.testing.assert_close(sin_T1R[:, 0].double(), angles_TR.sin() * 1.5 * sign_R, rtol=1e-6, atol=2e-7)


def test_a_gate_far_from_zero_is_its_input_or_nothing(kernels: NativeKernels) -> None:
    gate_up_T2E = torch.tensor([[1e4, 200.0, 90.0, -200.0, -1e4, 0.0] + [3.0] * 6])
    out_E = kernels.rows.activate_gate(gate_up_T2E, "silu")[0]
    assert out_E[:3].tolist() == [3e4, 600.0, 270.0]
    assert out_E[3:].abs().max() < 1e-30


@pytest.mark.parametrize("value", SPECIAL, ids=str)
@pytest.mark.parametrize("place", [0, 37, 47, 48, 95])
def test_what_is_no_number_stays_so_in_its_row_only(
    kernels: NativeKernels, normal: Callable[..., Tensor], value: float, place: int
) -> None:
    clean_TE = normal(1, 5, 96)
    spoilt_TE = clean_TE.clone()
    spoilt_TE[2, place] = value
    weight_E = normal(2, 96)
    for compute in (
        lambda x_TE: kernels.rows.rms_norm(x_TE, weight_E, 1e-6, 0.0),
        partial(kernels.rows.activate_gate, activation="silu"),
    ):
        clean, spoilt = compute(clean_TE), compute(spoilt_TE)
        others = torch.tensor([0, 1, 3, 4])
        assert torch.equal(clean[others], spoilt[others])
        assert not spoilt[2].isfinite().all() or (value == -torch.inf and place < 48)  # silu of -inf may be the limit, 0
    assert kernels.rows.rms_norm(spoilt_TE, weight_E, 1e-6, 0.0)[2].isnan().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8], ids=str)
@pytest.mark.parametrize("width", WIDTHS)
def test_quantized_rows_have_the_bits_of_torch(
    kernels: NativeKernels, normal: Callable[..., Tensor], width: int, dtype: torch.dtype
) -> None:
    x_TE = normal(3, 20, width) * torch.logspace(-42, 37, 20).unsqueeze(1)
    x_TE[4], x_TE[5, 0], x_TE[6] = 0, 0, -0.0
    x_TE[7] = torch.arange(width).remainder(255).sub(127) * 0.5  # halves are rounded to even
    (levels_TE, scale_T1), (expected_TE, expected_T1) = kernels.rows.quantize_rows(x_TE, dtype), quantize_rows(x_TE, dtype)
    assert levels_TE.dtype == dtype
    assert torch.equal(levels_TE, expected_TE)
    assert torch.equal(scale_T1, expected_T1)
    assert levels_TE.abs().max() == 127


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8], ids=str)
@pytest.mark.parametrize("value", SPECIAL, ids=str)
@pytest.mark.parametrize("place", [0, 30, 49])
def test_a_row_that_cannot_be_quantized_says_so_in_its_scale(
    kernels: NativeKernels, normal: Callable[..., Tensor], value: float, dtype: torch.dtype, place: int
) -> None:
    x_TE = normal(4, 3, 50)
    x_TE[1, place] = value
    (levels_TE, scale_T1), (expected_TE, expected_T1) = kernels.rows.quantize_rows(x_TE, dtype), quantize_rows(x_TE, dtype)
    assert scale_T1.isfinite().flatten().tolist() == expected_T1.isfinite().flatten().tolist() == [True, False, True]
    assert torch.equal(levels_TE[::2], expected_TE[::2])
    assert (levels_TE.float() * scale_T1)[1].isnan().all()


def test_rows_have_the_same_bits_alone_together_and_with_two_threads(
    kernels: NativeKernels, normal: Callable[..., Tensor], threads: Callable
) -> None:
    """Enough numbers for threads to be used; a row of 250 begins at any alignment."""
    x_TE, weight_E = normal(1, 400, 250), normal(2, 250)

    def all_of(x_TE: Tensor) -> list[Tensor]:
        quantized = [part for dtype in (torch.float32, torch.int8) for part in kernels.rows.quantize_rows(x_TE, dtype)]
        activations = [
            compute(x_TE, name) for name in ACTIVATIONS for compute in (kernels.rows.activate, kernels.rows.activate_gate)
        ]
        return [kernels.rows.rms_norm(x_TE, weight_E, 1e-6, 0.0), *activations, *quantized]

    with threads(2):
        together = all_of(x_TE)
    with threads(1):
        assert all(map(torch.equal, together, all_of(x_TE)))
        alone = [all_of(x_TE[t : t + 1]) for t in range(len(x_TE))]
    assert all(map(torch.equal, together, map(torch.cat, zip(*alone, strict=True))))
