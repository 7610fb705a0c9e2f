"""The command `ryzanstein bench collectives`: collectives, alone or in a model's decode steps."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from ryzanstein import errors
from ryzanstein.lab.bench.engine.collectives import decode_share
from ryzanstein.lab.bench.engine.collectives.byte_sizes import parse_sizes, show_size
from ryzanstein.lab.bench.engine.collectives.messages import ELEMENT_BYTES, OPS
from ryzanstein.lab.bench.engine.collectives.survey import CollectiveResult, Survey, measure
from ryzanstein.lab.bench.engine.report import publish, refusals_as_exit
from ryzanstein.worker.collectives.opening import default_backend
from ryzanstein.worker.collectives.segment import MAX_RANKS
from ryzanstein.worker.ranks.messages import RankSpec

_BACKENDS = ("shm", "gloo", "nccl", "symm_mem")


@dataclass(frozen=True, slots=True)
class Backends:
    """The measured backends, and why others are not measured."""

    chosen: tuple[str, ...]
    absent: Mapping[str, str]


def choose_backends(text: str, ranks: int) -> Backends:
    """Returns all backends that run here, or the named ones.

    Raises INVALID_ARGUMENT for a named one that is unknown or cannot run here.
    """
    wanted = _names("backends", text, _BACKENDS) if text else _BACKENDS
    absent = {name: reason for name in wanted if (reason := _why_not(name, ranks))}
    for name in absent if text else ():
        raise errors.invalid("backends", f"{name} {absent[name]}")
    return Backends(tuple(name for name in wanted if name not in absent), absent)


def _why_not(backend: str, ranks: int) -> str:
    """Returns why a backend cannot run here; empty if it can."""
    match backend:
        case "shm":
            return "" if default_backend("cpu") == "shm" else "needs a CPU with x86's store order"
        case "nccl":
            return _why_no_nccl(ranks)
        case "symm_mem":
            return _why_no_symmetric_memory()
    return ""


def _why_no_nccl(ranks: int) -> str:
    import torch

    devices = torch.cuda.device_count() if torch.distributed.is_nccl_available() else 0
    return "" if devices >= ranks else f"needs a CUDA device for each of {ranks} ranks, found {devices}"


def _why_no_symmetric_memory() -> str:
    """Returns why torch's one-shot all-reduce is not measured.

    Its kernels are for GPUs, and these ranks have no code that calls them.
    """
    import torch
    from torch.distributed import _symmetric_memory

    try:
        _symmetric_memory.empty(1, device=torch.device("cpu"))
    except RuntimeError as error:
        return f"needs symmetric memory between CPUs, which torch {torch.__version__} does not support: {error}"
    return "needs symmetric memory between GPUs; the ranks of this benchmark run on CPUs"


def _names(field: str, text: str, known: tuple[str, ...]) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(text.split(",")))
    if not set(names) <= set(known):
        raise errors.invalid(field, f"must be one of {', '.join(known)}", text)
    return names


def choose_sizes(text: str, ranks: int) -> tuple[int, ...]:
    """Returns sizes rounded down to elements that divide over the ranks, as nccl-tests does.

    Raises INVALID_ARGUMENT for less than one element each.
    """
    step = ELEMENT_BYTES * ranks
    sizes = parse_sizes(text)
    if sizes[0] < step:
        raise errors.invalid("sizes", f"must be at least {step} bytes for {ranks} ranks", sizes[0])
    return tuple(dict.fromkeys(size // step * step for size in sizes))


def table(results: Sequence[CollectiveResult]) -> Table:
    """Returns the table for people."""
    visible = Table(title="collectives", title_justify="left")
    for heading in ("op", "ranks", "size", "backend", "p50", "p99", "bus bandwidth"):
        visible.add_column(heading, justify="right")
    for result in results:
        visible.add_row(
            *(result.op, str(result.ranks), show_size(result.bytes), result.backend),
            f"{result.p50_s * 1e6:.1f} us",
            f"{result.p99_s * 1e6:.1f} us",
            f"{result.bus_bytes_per_s / 1e9:.3f} GB/s",
        )
    return visible


def collectives(
    *,
    ranks: Annotated[int, typer.Option(min=2, max=MAX_RANKS)] = 2,
    sizes: Annotated[str, typer.Option(help="like 8KiB, 2KiB,1MiB or 2KiB..64MiB (doubling); at most 1GiB")] = "2KiB..64MiB",
    ops: Annotated[str, typer.Option(help="comma-separated")] = ",".join(OPS),
    backends: Annotated[str, typer.Option(help="comma-separated; default: all that are supported here")] = "",
    pin: Annotated[bool, typer.Option(help="pin each rank to separate cores")] = False,
    threads: Annotated[int, typer.Option(min=1, max=1024, help="per rank")] = 1,
    rounds: Annotated[int, typer.Option(min=1, max=10**4)] = 5,
    seconds: Annotated[float, typer.Option(min=0.0, max=60.0, help="per op, size and backend")] = 0.5,
    model: Annotated[
        Path | None,
        typer.Option(help="checkpoint; also measures communication in its decode steps", exists=True, file_okay=False),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, max=10**6, help="decode steps per batch and round")] = 128,
    json_path: Annotated[str, typer.Option("--json", help="write JSON to this file; - is standard output")] = "",
) -> None:
    """Measure latency and bandwidth of collectives, and their share of a model's decode steps."""
    with refusals_as_exit() as people:
        wanted = choose_backends(backends, ranks)
        for name, reason in wanted.absent.items():
            people.print(f"left out: {name} {reason}", markup=False, soft_wrap=True)
        chosen = wanted.chosen
        survey = Survey(_names("ops", ops, OPS), choose_sizes(sizes, ranks), chosen, rounds, seconds)
        specs = {name: RankSpec(model="", tp=ranks, collectives=name, threads=threads, pin=pin) for name in chosen}
        load = None if model is None else decode_share.DecodeLoad.plan(model, specs, steps, rounds)
        results = asyncio.run(measure(survey, specs, people))
        document: dict[str, Any] = {"results": [asdict(result) for result in results]}
        if wanted.absent:
            document["absent"] = dict(wanted.absent)
        tables = [table(results)]
        if load is not None:
            shares = load.run(people)
            document |= {"model": str(model), "decode_share": [asdict(share) for share in shares]}
            tables.append(decode_share.table(shares))
        publish(document, tables, json_path)
