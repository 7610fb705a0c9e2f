"""The command `ryzanstein bench engine`: this machine's engine, alone or compared with peers."""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from msgspec.structs import replace

from ryzanstein import errors
from ryzanstein.lab.bench.disturbance import Watch
from ryzanstein.lab.bench.engine.engine import Workload, batches, integers, rank_spec, run_engine, table
from ryzanstein.lab.bench.engine.peers.checkpoint import checkpoint
from ryzanstein.lab.bench.engine.peers.contenders import OWN, Site, choose_peers
from ryzanstein.lab.bench.engine.peers.conversion import as_gguf
from ryzanstein.lab.bench.engine.peers.session import compare, peer_settings
from ryzanstein.lab.bench.engine.report import publish, refusals_as_exit
from ryzanstein.process.allotment import whole_cores
from ryzanstein.worker.collectives.segment import MAX_RANKS
from ryzanstein.worker.ranks.messages import RankSpec
from ryzanstein.worker.settings.quantization import KERNELS, KV_DTYPES, QUANTIZATIONS, Quantization
from ryzanstein.worker.text.model_files import ModelFiles

CACHE_HOME = Path(os.environ.get("HOME") or tempfile.gettempdir()) / ".cache"

CacheHome = Annotated[Path, typer.Option(envvar="XDG_CACHE_HOME", help="parent of ryzanstein/, the cache of peers and models")]


def rank_counts(text: str) -> tuple[int, ...]:
    """Parses `1,2`. Raises INVALID_ARGUMENT for a count that is out of range."""
    counts = integers("tp", text)
    if not 1 <= min(counts) <= max(counts) <= MAX_RANKS:
        raise errors.invalid("tp", f"must be 1 to {MAX_RANKS}", text)
    return counts


def one_of(field: str, text: str, known: tuple[str, ...]) -> str:
    """Returns the text itself. Raises INVALID_ARGUMENT if it is unknown."""
    if text not in known:
        raise errors.invalid(field, f"must be one of {', '.join(known)}", text)
    return text


def quantizations(text: str) -> tuple[Quantization, ...]:
    """Parses `none,int8`; each once."""
    names = dict.fromkeys(text.split(","))
    if not names.keys() <= set(QUANTIZATIONS):
        raise errors.invalid("quantization", f"must be one of {', '.join(QUANTIZATIONS)}", text)
    return tuple(kind for kind in QUANTIZATIONS if kind in names)


def engine(
    *,
    model: Annotated[str, typer.Option(help="directory, GGUF file, demo, or a preset of `synthesize`: S, L, M")],
    gguf: Annotated[
        str, typer.Option(help="convert the directory to a GGUF file of this type first: q8_0, q4_0, q4_k...")
    ] = "",
    json_path: Annotated[str, typer.Option("--json", help="write JSON to this file; - is standard output")] = "",
    tp: Annotated[str, typer.Option(help="numbers of ranks, comma-separated")] = "1",
    quantization: Annotated[str, typer.Option(help="weight formats of the engine, comma-separated")] = "none",
    kv_dtype: Annotated[str, typer.Option(help="KV cache format of the engine: auto, float16")] = "auto",
    kernels: Annotated[str, typer.Option(help="kernels of the engine: auto, native, torch")] = "auto",
    batch: Annotated[str, typer.Option(help="batch sizes, comma-separated")] = "1,4,8,32",
    prompt_tokens: Annotated[int, typer.Option(min=1, max=10**6)] = 128,
    new_tokens: Annotated[int, typer.Option(min=1, max=10**6)] = 128,
    rounds: Annotated[int, typer.Option(min=1, max=10**4)] = 3,
    threads: Annotated[int, typer.Option(min=0, max=1024, help="per rank, with --peers of all ranks; 0: all cores")] = 0,
    max_tokens_per_step: Annotated[
        int, typer.Option(min=1, max=65536, help="token budget of a step; at least the batch")
    ] = 512,
    openmp_spins: Annotated[int, typer.Option(min=0, max=10**9, help="spins before sleep; 0: OpenMP's default")] = 0,
    prefill_tokens: Annotated[
        int, typer.Option(min=0, max=10**6, help="with --peers also a prompt of so many, as the context allows; 0: none")
    ] = 2000,
    peers: Annotated[bool, typer.Option("--peers", help="also measure the installed peers, see install-peers")] = False,
    peers_dir: Annotated[Path | None, typer.Option(help="directory of the peers; default: peers/ in the cache")] = None,
    only: Annotated[str, typer.Option(help="only the peers of these engines, comma-separated")] = "",
    peer_timeout_s: Annotated[float, typer.Option(min=1.0, max=86_400, help="limit of a load and of each batch")] = 1200.0,
    cache_home: CacheHome = CACHE_HOME,
) -> None:
    """Measure tokens per second of the engine and its ranks on this machine."""

    def specs() -> Iterator[RankSpec]:
        for kind in quantizations(quantization):
            for ranks in rank_counts(tp):
                each = max(1, threads // ranks) if peers and threads else threads
                spec = rank_spec(served, workload, ranks, each, max_tokens_per_step)
                settings = dataclasses.replace(spec.settings, quantization=kind, **chosen)
                yield replace(spec, settings=settings, openmp_spins=openmp_spins)

    with refusals_as_exit() as people:
        chosen: dict[str, Any] = {
            "kv_dtype": one_of("kv-dtype", kv_dtype, KV_DTYPES),
            "kernels": one_of("kernels", kernels, KERNELS),
        }
        where = peers_dir or cache_home / "ryzanstein" / "peers"
        named = checkpoint(model, cache_home / "ryzanstein")
        served = as_gguf(named, gguf, where) if gguf else named
        files = ModelFiles.read(served)
        prefill = min(prefill_tokens, files.context_length - 1) if peers else 0
        workload = Workload(batches(batch), prompt_tokens, new_tokens, rounds, prefill)
        workload.check(files.context_length)
        watch = Watch()
        if not peers:
            results = [result for spec in specs() for result in run_engine(workload, spec, files.vocab_size, people)]
            seen = watch.stop()
            document = {"model": str(served), "results": [asdict(result) for result in results]}
            publish(document | {"disturbance": seen.document()}, [table(results)], json_path)
            people.print(str(seen), markup=False)
            return
        settings = peer_settings(served, workload, threads or whole_cores())
        site = Site(choose_peers(only, served), where, served, named if named.is_dir() else None, settings, peer_timeout_s)
        report = compare(list(specs()), site, workload, files.vocab_size, people)
        seen = watch.stop()
        publish(report.document() | {"disturbance": seen.document()}, report.tables(), json_path)
        people.print(str(seen), markup=False)
        if any(label.engine == OWN for label in report.outcome.failed):
            raise typer.Exit(1)
