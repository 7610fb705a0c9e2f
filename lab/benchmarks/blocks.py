"""Measures products with weights in blocks beside our own 8-bit and float products, interleaved: microseconds by rows.

.venv/bin/python lab/benchmarks/blocks.py [--shape 2048x2048] [--rows 1,8,64] [--types Q4_0,Q8_0] [--rounds 12]

A shape is outputs x inputs. One thread computes, and its own time counts: other work on the machine disturbs less. Figures are
minima, and in brackets how many times as fast as "int8" that is. Weights are random bytes, whose values do not matter.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from ryzanstein.worker.kernels.build import library
from ryzanstein.worker.kernels.functions.blocks import BLOCKS
from ryzanstein.worker.kernels.native import NativeKernels

Product = Callable[[Tensor], Tensor]


def blocks(native: NativeKernels, shape: tuple[int, int], kind: int) -> Product:
    packed = torch.randint(0, 100, (native.blocks.packed_bytes(*shape, kind),), dtype=torch.uint8)
    return lambda x_TI: native.blocks.product(x_TI, packed, None, shape[0], kind)


def products(native: NativeKernels, shape: tuple[int, int], types: list[str]) -> dict[str, Product]:
    """By name."""
    levels, scale_O = native.int8.pack(torch.randint(-127, 128, shape, dtype=torch.int8)), torch.ones(shape[0])
    floats = native.floats.pack(torch.randn(shape), torch.float32)
    return {
        "int8": lambda x_TI: native.int8.product(x_TI, levels, scale_O, 1),
        "float32": lambda x_TI: native.floats.product(x_TI, floats, None, shape[0]),
    } | {name: blocks(native, shape, BLOCKS[name]) for name in types}


def measure(named: dict[str, Product], x_TI: Tensor, rounds: int) -> dict[str, float]:
    """Returns the shortest time of each, in seconds."""
    times = {name: float("inf") for name in named}
    for _ in range(rounds):
        for name, product in named.items():
            began = time.process_time()
            product(x_TI)
            times[name] = min(times[name], time.process_time() - began)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="2048x2048")
    parser.add_argument("--rows", default="1,8,64")
    parser.add_argument("--types", default=",".join(BLOCKS))
    parser.add_argument("--rounds", type=int, default=12)
    args = parser.parse_args()
    torch.set_num_threads(1)
    num_outputs, num_inputs = map(int, args.shape.split("x"))
    named = products(NativeKernels(library()), (num_outputs, num_inputs), args.types.split(","))
    rows = [int(count) for count in args.rows.split(",")]
    times = {count: measure(named, torch.randn(count, num_inputs), args.rounds) for count in rows}
    table = Table("us", *(f"{count} rows" for count in rows), title=args.shape)
    for name in named:
        table.add_row(name, *(f"{t[name] * 1e6:,.0f} ({t['int8'] / t[name]:.2f})" for t in times.values()))
    Console().print(table)


if __name__ == "__main__":
    main()
