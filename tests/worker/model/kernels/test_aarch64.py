"""The kernels for 64-bit Arm under emulation: their tests, and the bits that every CPU computes alike.

qemu executes the library that the wheel for Arm carries. It and the compiler are installed by `bash .ci/parts emulation`.
"""

import importlib.util
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.worker.model.program.driver import compile_driver, run_driver
from torch import Tensor

from ryzanstein.worker.kernels import wheel
from ryzanstein.worker.kernels.levels import best_level
from ryzanstein.worker.kernels.native import NativeKernels

HERE = Path(__file__).parent
MODEL = HERE.parent
# All that take the fixture `kernels`, but for whole models, which open kernels themselves.
SUITES = [
    HERE / "test_rows.py",
    HERE / "test_rotation.py",
    HERE / "test_attention.py",
    HERE / "test_prefill.py",
    HERE / "test_seal.py",
    HERE / "test_cold.py",
    HERE / "test_delta.py",
    HERE / "test_mamba.py",
    MODEL / "test_draw.py",
    MODEL / "products" / "test_packed.py",
    MODEL / "products" / "test_unpacked.py",
    MODEL / "products" / "test_int8.py",
    MODEL / "products" / "test_blocks.py",
]
# These compile for x86.
LEFT_OUT = "not narrower_registers and not on_every_cpu"

spec = importlib.util.spec_from_file_location("aarch64_emulation", HERE / "aarch64_emulation.py")
assert spec is not None
assert spec.loader is not None
emulation = importlib.util.module_from_spec(spec)
spec.loader.exec_module(emulation)


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("suite", SUITES, ids=lambda path: path.stem)
def test_the_tests_of_kernels_pass(suite: Path, part: Callable[[str], str]) -> None:
    part(emulation.COMPILER)
    part(emulation.EMULATOR[0])
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "aarch64_emulation",
        "-p",
        "no:cacheprovider",
        "--timeout=1200",
        "-k",
        LEFT_OUT,
    ]
    environment = os.environ | {"PYTHONPATH": str(HERE)}
    done = subprocess.run(
        [*command, str(suite)], capture_output=True, text=True, timeout=1400, check=False, env=environment, cwd=HERE.parents[3]
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert re.search(r"[1-9]\d* passed", done.stdout)
    assert re.search(r"^[1-9]\d* calls were emulated", done.stdout, flags=re.MULTILINE)


def test_what_is_not_summed_across_lanes_has_the_bits_of_this_machine(
    kernels: NativeKernels, results: Callable[[NativeKernels], dict[str, Tensor]], part: Callable[[str], str]
) -> None:
    """A float product is one chain of fused additions for each output, an activation has a lane for each number."""
    part(emulation.COMPILER)
    part(emulation.EMULATOR[0])
    if platform.machine() == "x86_64":
        best_level("x86_64", Path("/proc/cpuinfo").read_text())  # raises on CPUs that cannot add products unrounded
    here = results(kernels)
    with emulation.emulated_kernels() as emulated:
        there = results(emulated)
    summed_across_lanes = ("rms_norm", "float_product_unpacked", "attend", "lse", "delta_rule", "mamba_norm")
    of_the_c_library = {"gelu", "gelu gate", "rotary_angles"}  # erf, sine, cosine: glibc's code for Arm is another
    for name, expected in here.items():
        if name.startswith(summed_across_lanes) or name in of_the_c_library:
            torch.testing.assert_close(there[name], expected, rtol=1e-4, atol=1e-4, msg=name)
        else:
            assert torch.equal(there[name], expected), name


@pytest.fixture(scope="module")
def driver(part: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    part(emulation.COMPILER)
    part(emulation.EMULATOR[0])
    folder = tmp_path_factory.mktemp("aarch64")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CC", emulation.COMPILER)
        patch.setenv(wheel.ARCH, "aarch64")
        (library,) = wheel.compile_levels(folder)
    compile_driver([emulation.COMPILER], library, folder / "driver")
    return folder / "driver"


@pytest.mark.parametrize(("num_ranks", "num_threads"), [(1, 1), (1, 2), (2, 2), (3, 1)])
def test_a_program_computes_what_its_functions_compute(driver: Path, num_ranks: int, num_threads: int) -> None:
    resumed = run_driver([*emulation.EMULATOR, str(driver)], num_ranks, num_threads)
    assert (resumed > 0) == (num_ranks > 1)
