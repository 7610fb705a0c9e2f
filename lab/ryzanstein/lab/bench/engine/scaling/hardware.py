"""The figures that the scaling model needs.

They are measured here and read from the benchmarks' documents, or published by others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from ryzanstein import errors
from ryzanstein.lab.bench.engine.scaling.model import Hardware, Latencies

_GPU_RANKS = (1, 2, 4, 8)

# H200: NVIDIA's data sheet, 4.8 TB/s and 989 TFLOP/s bfloat16 without sparsity; 900 GB/s of NVLink as the H100 has.
_H200_READ_BYTES_PER_S = 4.8e12
_H200_FLOPS_PER_S = 989e12

# One-shot and two-shot kernels of SGLang on H100s with NVLink, without CUDA graphs: github.com/sgl-project/sglang/pull/2904.
_ONE_SHOT_SIZES = (512, 4096, 32768, 262144, 524288, 1048576)
_ONE_SHOT_US: Mapping[int, tuple[float, ...]] = {
    2: (3.7, 3.9, 4.5, 7.9, 12.5, 19.9),
    4: (4.8, 3.7, 4.8, 13.9, 20.2, 31.1),
    8: (5.9, 5.7, 7.8, 16.7, 22.1, 33.8),
}

# NCCL 2.28 or 2.29 on eight H100s, out of place: github.com/NVIDIA/nccl/issues/2094.
_NCCL_8_US = ((1024, 34.57), (2048, 33.40), (4096, 32.51), (8192, 32.89), (16384, 32.41), (32768, 33.56))


def published() -> dict[str, Hardware]:
    """Returns the hardware by name.

    The unsplit part of a step is not published, so it is missing.
    """
    one_shot = {
        ranks: Latencies(tuple((size, us * 1e-6) for size, us in zip(_ONE_SHOT_SIZES, row, strict=True)))
        for ranks, row in _ONE_SHOT_US.items()
    }
    nccl = {8: Latencies(tuple((size, us * 1e-6) for size, us in _NCCL_8_US))}
    return {"h200-one-shot": _h200("h200-one-shot", one_shot), "h200-nccl": _h200("h200-nccl", nccl)}


def _h200(name: str, all_reduce: Mapping[int, Latencies]) -> Hardware:
    read = dict.fromkeys(_GPU_RANKS, _H200_READ_BYTES_PER_S)
    return Hardware(name, read, dict.fromkeys(_GPU_RANKS, _H200_FLOPS_PER_S), all_reduce, {})


class _Ceiling(msgspec.Struct):
    threads: int
    read_bytes_per_s: float
    matmul_flops_per_s: float


class _Ceilings(msgspec.Struct):
    ceilings: list[_Ceiling]


class _Collective(msgspec.Struct):
    backend: str
    op: str
    ranks: int
    bytes: int
    p50_s: float


class _Collectives(msgspec.Struct):
    results: list[_Collective]


class MeasuredStep(msgspec.Struct, frozen=True):
    """One figure of `bench scaling`."""

    layout: str
    load: str
    step_s: float


class ScalingDocument(msgspec.Struct, frozen=True):
    """The document of `bench scaling --json`."""

    quantization: str
    results: list[MeasuredStep]
    unsplit: list[MeasuredStep] = []

    def step_s(self, load: str, ranks: int) -> float | None:
        """Returns the step time measured with one thread per rank, not pinned."""
        return next((row.step_s for row in self.results if row.load == load and row.layout == f"{ranks}x1"), None)


def measured(machine: Path, collectives: Path, scaling: ScalingDocument) -> Hardware:
    """Returns hardware from `bench machine`, `bench collectives` and `bench scaling --unsplit`.

    Of the collectives it uses those in shared memory. The threads of one process stand for the same
    number of ranks. Raises INVALID_ARGUMENT for a file that is not such a document, and
    FAILED_PRECONDITION for a missing one.
    """
    ceilings = read_document("machine", machine, _Ceilings).ceilings
    return Hardware(
        "here",
        {row.threads: row.read_bytes_per_s / row.threads for row in ceilings},
        {row.threads: row.matmul_flops_per_s / row.threads for row in ceilings},
        _all_reduces(read_document("collectives", collectives, _Collectives).results),
        {row.load: row.step_s for row in scaling.unsplit},
    )


def _all_reduces(rows: Sequence[_Collective]) -> dict[int, Latencies]:
    points: dict[int, list[tuple[int, float]]] = {}
    for row in rows:
        if row.backend == "shm" and row.op == "all_reduce":
            points.setdefault(row.ranks, []).append((row.bytes, row.p50_s))
    try:
        return {ranks: Latencies(tuple(sorted(sizes))) for ranks, sizes in points.items()}
    except ValueError as error:
        raise errors.invalid("collectives", str(error)) from error


Document = TypeVar("Document")


def read_document(option: str, path: Path, kind: type[Document]) -> Document:
    """Reads a benchmark's JSON, as far as it is needed here."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except OSError as error:
        raise errors.failed_precondition("FILE_MISSING", f"{option}: {error}") from error
    except msgspec.MsgspecError as error:
        raise errors.invalid(option, f"is not the benchmark's document: {error}", str(path)) from error
