"""Compiles step_driver.c for a library of kernels, and runs it."""

import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

import ryzanstein.worker.kernels

_SOURCE = Path(__file__).with_name("step_driver.c")
_KERNELS = Path(ryzanstein.worker.kernels.__path__[0])


def compile_driver(compiler: Sequence[str], library: Path, path: Path) -> None:
    flags = ("-std=gnu11", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-ffp-contract=off", f"-I{_KERNELS}")
    linked = (str(library), f"-Wl,-rpath,{library.parent}", "-fopenmp", "-lpthread", "-lm")
    subprocess.run([*compiler, *flags, str(_SOURCE), *linked, "-o", str(path)], check=True, timeout=60)


def run_driver(command: Sequence[str], num_ranks: int, num_threads: int, timeout_s: float = 100) -> int:
    """Returns how many meetings were resumed. It fails if any number was another one than without a program."""
    environment = os.environ | {"OMP_WAIT_POLICY": "passive"}
    arguments = [*command, str(num_ranks), str(num_threads)]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=timeout_s, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    told = re.fullmatch(r"equal, (\d+) resumed\n", done.stdout)
    assert told, done.stdout
    return int(told[1])
