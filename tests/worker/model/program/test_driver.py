"""Programs without Python, of one to three ranks, one of which is late in each step. `test_aarch64.py` does the same on Arm."""

from pathlib import Path

import pytest
from tests.worker.model.program.driver import compile_driver, run_driver

from ryzanstein.worker.kernels.compiling import find_compiler


@pytest.fixture(scope="module")
def driver(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("driver") / "driver"
    compile_driver(find_compiler(), built, path)
    return path


@pytest.mark.parametrize(("num_ranks", "num_threads"), [(1, 1), (1, 3), (2, 1), (2, 2), (3, 3)])
def test_a_program_computes_what_its_functions_compute(driver: Path, num_ranks: int, num_threads: int) -> None:
    resumed = run_driver([str(driver)], num_ranks, num_threads)
    assert (resumed > 0) == (num_ranks > 1)
