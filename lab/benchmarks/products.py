"""Measures a matrix product with every kernel of this machine, interleaved: microseconds by number of rows.

.venv/bin/python lab/benchmarks/products.py [--threads 2] [--shapes 864x288,2560x2048] [--rows 1,8,32,512]
[RYZANSTEIN_KERNELS_LEVEL=x86-64-v3] .venv/bin/python lab/benchmarks/products.py --own [--cold-mib 96] ...

A shape is outputs x inputs. Our own kernels are "packed" and "int8 own". `--own` measures these and blocks alone: GB/s at which
a weight is read up to 4 rows, else billions of products a second. `--cold-mib`: copies of a weight, so many MiB in all, take
turns, so that it comes from memory as in a model.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
import warnings
from collections.abc import Callable, Iterator

import torch
from rich.console import Console
from rich.table import Table

from ryzanstein.worker.kernels.build import library
from ryzanstein.worker.kernels.functions.blocks import BLOCKS
from ryzanstein.worker.kernels.native import NativeKernels
from ryzanstein.worker.products import Product
from ryzanstein.worker.products.fastest import exact_kernels, worthwhile
from ryzanstein.worker.products.floats import Blocked, ByInputs, ByOutputs, Packed
from ryzanstein.worker.products.half import FbgemmHalfProduct
from ryzanstein.worker.products.int8 import FbgemmKernel, Int8Product, NativeKernel, OneDnnKernel, block_of

INT8_NAMES = {NativeKernel: "int8 own", FbgemmKernel: "int8 FBGEMM", OneDnnKernel: "int8 oneDNN"}
ROUNDS, ROUND_S = 7, 0.02
BLOCK_TYPES = ("Q4_0", "Q4_K", "Q8_0")
FEW_ROWS = 4  # for which reading the weight takes the time

Multiply = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


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


def own_products(shape: tuple[int, int], native: NativeKernels) -> dict[str, tuple[torch.Tensor, Multiply]]:
    """Packed weights by name, and their products with rows. Bytes of blocks do not matter."""
    num_outputs, num_inputs = shape
    weight_OI, scale_O = torch.randn(shape), torch.ones(num_outputs)
    levels_OI = torch.randint(-127, 128, shape, dtype=torch.int8)
    block = block_of(num_inputs)

    def floats(x_TI: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
        return native.floats.product(x_TI, packed, None, num_outputs)

    def blocks(kind: int) -> tuple[torch.Tensor, Multiply]:
        packed = torch.randint(0, 60, (native.blocks.packed_bytes(*shape, kind),), dtype=torch.uint8)
        return packed, lambda x_TI, packed: native.blocks.product(x_TI, packed, None, num_outputs, kind)

    return {
        "float32": (native.floats.pack(weight_OI, torch.float32), floats),
        "float16": (native.floats.pack(weight_OI, torch.float16), floats),
        "int8": (native.int8.pack(levels_OI), lambda x_TI, packed: native.int8.product(x_TI, packed, scale_O, block)),
    } | {name: blocks(BLOCKS[name]) for name in BLOCK_TYPES if num_inputs % 256 == 0 or name != "Q4_K"}


def rate(shape: tuple[int, int], count: int, weight_bytes: int, least_s: float) -> str:
    if count <= FEW_ROWS:
        return f"{weight_bytes / least_s / 1e9:.1f} GB/s"
    return f"{count * shape[0] * shape[1] / least_s / 1e9:.1f}"


@torch.inference_mode()
def measure_own(shape: tuple[int, int], rows: list[int], cold_bytes: int, native: NativeKernels) -> Table:
    """The best of the rounds."""
    table = Table("GMAC/s", *(f"{count} rows" for count in rows), title=f"{shape[0]} x {shape[1]}")
    for name, (packed, multiply) in own_products(shape, native).items():
        weights: Iterator[torch.Tensor] = itertools.cycle(
            [packed, *(packed.clone() for _ in range(cold_bytes // packed.nbytes))]
        )
        best = [
            min(seconds(lambda x_TI: multiply(x_TI, next(weights)), torch.randn(count, shape[1])) for _ in range(ROUNDS))  # noqa: B023
            for count in rows
        ]
        table.add_row(
            name, *(rate(shape, *of, least_s) for of, least_s in zip(((n, packed.nbytes) for n in rows), best, strict=True))
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--shapes", default="864x288,2560x2048")
    parser.add_argument("--rows", default="1,4,8,32,128,512")
    parser.add_argument("--own", action="store_true")
    parser.add_argument("--cold-mib", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    warnings.simplefilter("ignore", UserWarning)
    native = NativeKernels(library())
    for text in args.shapes.split(","):
        num_outputs, num_inputs = map(int, text.split("x"))
        shape, rows = (num_outputs, num_inputs), [int(count) for count in args.rows.split(",")]
        Console().print(measure_own(shape, rows, args.cold_mib * 2**20, native) if args.own else measure(shape, rows, native))


if __name__ == "__main__":
    main()
