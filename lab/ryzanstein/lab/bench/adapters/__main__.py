"""`python -P -m ryzanstein.lab.bench.adapters`, or `ryzanstein bench adapters`: many adapters on a cluster of two nodes.

Exit codes: 0 every answer was right and nothing grew; 1 something was not; 2 wrong usage.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from ryzanstein.cli.processes.cluster import ClusterSpec, LocalCluster
from ryzanstein.demo import MODEL_DIR
from ryzanstein.lab.bench.adapters.document import document, faults, lines, names
from ryzanstein.lab.bench.adapters.survey import AdaptersFound, AdaptersPlan, AdaptersSurvey
from ryzanstein.lab.bench.disturbance import Watch
from ryzanstein.lab.chaos.stage.random_adapter import random_adapter
from ryzanstein.lab.output_files import check_writable

_DEFAULT = AdaptersPlan()
_RANKS = (4, 8, 16)


def adapters(  # noqa: PLR0917 - the command's options
    num: Annotated[int, typer.Option("--adapters", min=8, max=4096, help="Adapters of the demo model.")] = _DEFAULT.adapters,
    resident: Annotated[
        int, typer.Option(min=1, max=512, help="Adapters that a node's memory holds, about.")
    ] = _DEFAULT.resident,
    seconds: Annotated[float, typer.Option(min=5, max=86_400, help="How long they are asked for.")] = _DEFAULT.seconds,
    rate: Annotated[float, typer.Option(min=0.1, max=1000, help="Questions a second, on average.")] = _DEFAULT.rate,
    tokens: Annotated[int, typer.Option(min=1, max=512, help="Of each answer.")] = _DEFAULT.tokens,
    exponent: Annotated[float, typer.Option(min=0, max=4, help="Of the distribution of names (Zipf).")] = _DEFAULT.exponent,
    restarts: Annotated[bool, typer.Option(help="Kill a node, the router and the orchestrator at the end.")] = True,
    seed: Annotated[int, typer.Option(min=0, max=2**31 - 1, help="The same seed gives the same questions.")] = 0,
    json_path: Annotated[str, typer.Option("--json", help="File for the figures; - is standard output.")] = "",
) -> None:
    """Register many adapters on two nodes, ask for them at random, and compare with the model alone."""
    check_writable(None if json_path in ("", "-") else Path(json_path), "--json")
    plan = AdaptersPlan(num, resident, seconds, rate, tokens, exponent, restarts=restarts, seed=seed)
    watch = Watch()
    with tempfile.TemporaryDirectory() as folder:
        found = surveyed(plan, Path(folder))
    seen = watch.stop()
    content = document(plan, found, MODEL_DIR.name) | {"disturbance": seen.document()}
    if json_path == "-":
        print(json.dumps(content, indent=1))
    elif json_path:
        Path(json_path).write_text(json.dumps(content, indent=1) + "\n")
    for line in (*lines(content), str(seen)):
        _tell(line)
    missed = list(faults(content))
    for line in missed:
        _tell(f"MISSED {line}")
    raise typer.Exit(1 if missed else 0)


def surveyed(plan: AdaptersPlan, folder: Path) -> AdaptersFound:
    """Writes the adapters, starts a cluster and surveys it."""
    _tell(f"{plan.adapters} adapters are written")
    rng = random.Random(plan.seed)
    written = {
        name: random_adapter(folder / name, MODEL_DIR, seed=1000 + number, rank=rng.choice(_RANKS), size=1.0)
        for number, name in enumerate(names(plan.adapters))
    }
    sizes = [(path / "adapter_model.safetensors").stat().st_size for path in written.values()]
    budget = plan.resident * sum(sizes) // len(sizes)
    spec = ClusterSpec(MODEL_DIR, num_nodes=2, tp=1, worker_flags=("--adapter-bytes", str(budget)))
    with LocalCluster(spec) as cluster:
        survey = AdaptersSurvey(cluster, plan, written, _tell)
        survey.found.budget = budget
        return asyncio.run(survey.run())


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    typer.run(adapters)
