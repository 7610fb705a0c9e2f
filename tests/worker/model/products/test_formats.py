"""A model's format: what it makes of a weight, what it refuses, what it says it will keep."""

import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ryzanstein.worker.kernels.native import NativeKernels
from ryzanstein.worker.products.formats import WeightFormat
from ryzanstein.worker.refusal import ModelRefused
from ryzanstein.worker.settings.quantization import Quantization

CPU = torch.device("cpu")
FORMATS: list[Quantization] = ["none", "fp16", "int8"]
WORST = {"none": 1e-6, "fp16": 1e-3, "int8": 0.02}
RESIDENT = """
import sys, torch
from ryzanstein.worker.kernels.build import library
from ryzanstein.worker.kernels.native import NativeKernels
from ryzanstein.worker.products.formats import WeightFormat

def resident():
    return int(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmRSS"))) * 1024

quantization, kernels, num_outputs, num_inputs, count = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])
torch.set_num_threads(1)
native = NativeKernels(library()) if kernels == "native" else None
weight_format = WeightFormat(quantization, torch.device("cpu"), torch.float32, native)
weight_OI = torch.randn(num_outputs, num_inputs)
products = [weight_format.product(weight_OI.clone(), None)]  # what only the first costs
products[0](torch.ones(1, num_inputs))
before = resident()
products += [weight_format.product(weight_OI.clone(), None) for _ in range(count)]
print((resident() - before) / count / weight_format.packed_bytes(weight_OI))
"""


@pytest.mark.parametrize("quantization", FORMATS)
@pytest.mark.parametrize("kept", [False, True])
def test_every_format_multiplies_and_adds_the_bias(
    native: NativeKernels | None, normal: Callable[..., Tensor], quantization: Quantization, kept: bool
) -> None:
    weight_OI, bias_O, x_TI = normal(1, 90, 64), normal(2, 90), normal(3, 11, 64)
    product = WeightFormat(quantization, CPU, torch.float32, native).product(weight_OI, bias_O, kept=kept)
    expected_TO = x_TI.double() @ weight_OI.double().t() + bias_O.double()
    assert (product(x_TI) - expected_TO).norm() < WORST[quantization] * expected_TO.norm()


@pytest.mark.parametrize("quantization", FORMATS)
def test_a_weight_without_outputs_gives_none(native: NativeKernels | None, quantization: Quantization) -> None:
    """An expert that lives on another rank."""
    weight_format = WeightFormat(quantization, CPU, torch.float32, native)
    assert weight_format.product(torch.zeros(0, 8), None)(torch.ones(3, 8)).shape == (3, 0)
    assert weight_format.packed_bytes(torch.empty((0, 8), device="meta")) == 0


@pytest.mark.parametrize("quantization", ["fp16", "int8"])
@pytest.mark.parametrize(
    ("device", "dtype", "message"),
    [
        ("cuda", torch.float32, "torch.float32 on cuda"),
        ("cpu", torch.bfloat16, "torch.bfloat16 on cpu"),
        ("cpu", torch.float16, "torch.float16 on cpu"),
    ],
)
def test_devices_and_dtypes_without_such_kernels_are_refused(
    quantization: Quantization, device: str, dtype: torch.dtype, message: str
) -> None:
    with pytest.raises(ModelRefused, match=f"quantization {quantization} needs float32 on a CPU, not {message}"):
        WeightFormat(quantization, torch.device(device), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_quantization_any_dtype_is_served(dtype: torch.dtype) -> None:
    product = WeightFormat("none", CPU, dtype).product(torch.ones((3, 4), dtype=dtype), None)
    assert product(torch.ones((2, 4), dtype=dtype)).tolist() == [[4.0] * 3] * 2


@pytest.mark.parametrize("quantization", FORMATS)
@pytest.mark.parametrize(
    ("shape", "most"), [((1100, 520, 40), 1.25), ((4097, 1024, 8), 1.05)], ids=["half a megabyte", "four megabytes"]
)
@pytest.mark.long
def test_packed_bytes_are_what_memory_grows_by(
    native: NativeKernels | None, quantization: Quantization, shape: tuple[int, int, int], most: float
) -> None:
    """In a process of its own, as torch keeps what it has freed. Kernels round widths up, which small weights feel."""
    arguments = [
        sys.executable,
        "-W",
        "ignore",
        "-c",
        RESIDENT,
        quantization,
        "torch" if native is None else "native",
        *map(str, shape),
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
    ratio = float(subprocess.run(arguments, env=environment, check=True, capture_output=True, timeout=100).stdout)
    assert 0.95 < ratio < most


@pytest.mark.parametrize("quantization", FORMATS)
@pytest.mark.parametrize("kept", [False, True])
def test_a_large_weight_that_is_kept_is_in_memory_once_where_nothing_is_quantized(
    native: NativeKernels | None, quantization: Quantization, kept: bool
) -> None:
    large_OI, small_OI = (torch.empty(outputs, 1024, device="meta") for outputs in (4096, 16))
    weight_format = WeightFormat(quantization, CPU, torch.float32, native)
    added = [weight_format.added_bytes(weight_OI, kept=kept) for weight_OI in (large_OI, small_OI)]
    packed = [weight_format.packed_bytes(weight_OI) for weight_OI in (large_OI, small_OI)]
    if not kept:
        assert added == [packed[0] - large_OI.nbytes, packed[1] - small_OI.nbytes]
    else:
        assert added == ([0, packed[1]] if quantization == "none" else packed)
