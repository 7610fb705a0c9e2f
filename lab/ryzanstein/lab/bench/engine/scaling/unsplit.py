"""What ranks cannot share: operators, plans, scheduling.

It is measured on a twin of the model that is as deep and hardly wide. The twin's weights fit any
cache and its products take almost no time. So the time of its step is what a step of the model
takes besides products and memory. The twin is a random Llama, for any model.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console

from ryzanstein.lab.bench.engine.scaling.figures import ScalingFigure, figures
from ryzanstein.lab.bench.engine.scaling.layouts import RankLayout
from ryzanstein.lab.bench.engine.scaling.rounds import Bench, ScalingLoad
from ryzanstein.tools.synthesize.command import Recipe, synthesize
from ryzanstein.tools.synthesize.shapes import ModelShape
from ryzanstein.worker.architectures.registry import read_spec

_WIDTH, _HEADS, _VOCAB = 64, 2, 512


async def measure_unsplit(bench: Bench, loads: list[ScalingLoad], rounds: int, console: Console) -> list[ScalingFigure]:
    """Measures steps of the twin on one rank with one thread."""
    with TemporaryDirectory(prefix="ryzanstein-twin-") as folder:
        _write_twin(bench.model, Path(folder))
        twin = replace(bench, model=Path(folder), vocab_size=_VOCAB, quantization="none")
        return figures(await twin.measure([RankLayout(1, 1)], loads, rounds, console))


def _write_twin(model: Path, folder: Path) -> None:
    spec = read_spec(model)
    shape = ModelShape(_WIDTH, spec.num_layers, _HEADS, _HEADS, _WIDTH, _VOCAB, spec.context_length)
    synthesize(folder, Recipe("llama", shape, "float32", 0, 1))
