"""Why small weights are laid out by inputs: one product of a decode step in both layouts, interleaved.

.venv/bin/python benchmarks/products.py [--threads 2]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

SHAPES = ((1024, 192), (384, 192), (192, 512))
BATCHES = (1, 8, 32)
ROUNDS, CALLS = 9, 300


def seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    for _ in range(CALLS):
        call()
    return (time.perf_counter() - began) / CALLS


@torch.inference_mode()
def compare(num_outputs: int, num_inputs: int, batch: int) -> tuple[float, float]:
    """Medians in seconds: weights of [outputs, inputs], and of [inputs, outputs]."""
    x, by_outputs = torch.randn(batch, num_inputs), torch.randn(num_outputs, num_inputs)
    by_inputs = by_outputs.t().contiguous()
    calls = (lambda: F.linear(x, by_outputs)), (lambda: torch.mm(x, by_inputs))
    rounds = [[seconds(call) for call in calls] for _ in range(ROUNDS)]
    return statistics.median(r[0] for r in rounds), statistics.median(r[1] for r in rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    torch.set_num_threads(parser.parse_args().threads)
    for num_outputs, num_inputs in SHAPES:
        for batch in BATCHES:
            linear_s, mm_s = compare(num_outputs, num_inputs, batch)
            microseconds = f"{linear_s * 1e6:.1f} / {mm_s * 1e6:.1f} us"
            print(f"{num_outputs} x {num_inputs}, batch {batch}: {microseconds} ({mm_s / linear_s:.2f})")


if __name__ == "__main__":
    main()
