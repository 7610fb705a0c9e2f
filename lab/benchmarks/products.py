"""Measures a matrix product with every kernel of this machine, interleaved: microseconds by number of rows.

.venv/bin/python lab/benchmarks/products.py [--threads 2] [--shapes 864x288,2560x2048] [--rows 1,8,32,512]

A shape is outputs x inputs. Our own kernels are "packed" and "int8 own".
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings

import torch
from rich.console import Console
from rich.table import Table

from ryzanstein.worker.kernels.build import library
from ryzanstein.worker.kernels.native import NativeKernels
from ryzanstein.worker.products import Product
from ryzanstein.worker.products.fastest import exact_kernels, worthwhile
from ryzanstein.worker.products.floats import Blocked, ByInputs, ByOutputs, Packed
from ryzanstein.worker.products.half import FbgemmHalfProduct
from ryzanstein.worker.products.int8 import FbgemmKernel, Int8Product, NativeKernel, OneDnnKernel

INT8_NAMES = {NativeKernel: "int8 own", FbgemmKernel: "int8 FBGEMM", OneDnnKernel: "int8 oneDNN"}
ROUNDS, ROUND_S = 7, 0.02


def products(weight_OI: torch.Tensor, native: NativeKernels) -> dict[str, Product]:
    """By name."""
    kinds = worthwhile(list(dict.fromkeys([*exact_kernels(native), *exact_kernels(None)])), native)
    return {
        "by outputs": ByOutputs(weight_OI, None),
        "by inputs": ByInputs(weight_OI, None),
        "oneDNN": Blocked(weight_OI, None),
        "packed": Packed(weight_OI, None, native, torch.float32),
        "fp16 FBGEMM": FbgemmHalfProduct(weight_OI, None),
        "fp16 packed": Packed(weight_OI, None, native, torch.float16),
    } | {INT8_NAMES[kind]: Int8Product.of(weight_OI, None, kind, native) for kind in kinds}


def seconds(product: Product, x_TI: torch.Tensor) -> float:
    """Of one call, on average over a part of a second."""
    began, calls = time.perf_counter(), 0
    while time.perf_counter() - began < ROUND_S or not calls:
        product(x_TI)
        calls += 1
    return (time.perf_counter() - began) / calls


@torch.inference_mode()
def measure(shape: tuple[int, int], rows: list[int], native: NativeKernels) -> Table:
    """Medians of the rounds."""
    named = products(torch.randn(shape), native)
    table = Table("us", *(f"{count} rows" for count in rows), title=f"{shape[0]} x {shape[1]}")
    times: dict[tuple[str, int], list[float]] = {}
    for _ in range(ROUNDS):
        for count in rows:
            x_TI = torch.randn(count, shape[1])
            for name, product in named.items():
                times.setdefault((name, count), []).append(seconds(product, x_TI))
    for name in named:
        table.add_row(name, *(f"{statistics.median(times[name, count]) * 1e6:,.0f}" for count in rows))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--shapes", default="864x288,2560x2048")
    parser.add_argument("--rows", default="1,4,8,32,128,512")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    warnings.simplefilter("ignore", UserWarning)
    native = NativeKernels(library())
    for shape in args.shapes.split(","):
        num_outputs, num_inputs = map(int, shape.split("x"))
        Console().print(measure((num_outputs, num_inputs), [int(count) for count in args.rows.split(",")], native))


if __name__ == "__main__":
    main()
