"""Ranks that load a model of 200 MB: how much memory they take for it, and what they tell about their start."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ryzanstein.lab.bench.engine.__main__ import app
from ryzanstein.tools.synthesize.command import Recipe, synthesize
from ryzanstein.tools.synthesize.shapes import ModelShape

PHASES = ["spawn", "import", "group", "load", "warm_up"]
SHAPE = ModelShape(1024, 4, 16, 4, 2816, 4096)  # 53 million parameters
CODE_BYTES = 16 * 2**20  # torch's own pages that loading is the first to run: about 12 MiB, whatever the model


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[dict[str, Any]]]:
    """What `ryzanstein bench loading` tells of one and of two ranks, for a checkpoint of a dtype, served in float32."""

    def measure(dtype: str) -> list[dict[str, Any]]:
        model_dir = tmp_path_factory.mktemp(dtype)
        synthesize(model_dir, Recipe("llama", SHAPE, dtype, seed=0, num_files=3))
        result_file = model_dir / "load.json"
        command = ["loading", "--model", str(model_dir), "--tp", "1,2", "--rounds", "1", "--threads", "1"]
        result = CliRunner().invoke(app, [*command, "--json", str(result_file)])
        assert result.exit_code == 0, result.output
        return json.loads(result_file.read_text())["results"]

    return measure


@pytest.mark.distributed
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.long
def test_a_rank_takes_the_memory_of_its_slice(loaded: Callable[[str], list[dict[str, Any]]], dtype: str) -> None:
    ranks = loaded(dtype)
    assert [(rank["tp"], rank["rank"]) for rank in ranks] == [(1, 0), (2, 0), (2, 1)]
    layer_bytes = 4 * SHAPE.hidden_size * (2560 + 3 * SHAPE.intermediate_size)
    head_bytes = 4 * SHAPE.hidden_size * SHAPE.vocab_size
    for rank in ranks:
        assert list(rank["phases"]) == PHASES
        assert min(time["median_s"] for time in rank["phases"].values()) > 0
        assert 0.95 * rank["slice_bytes"] <= rank["resident_bytes"] <= 1.1 * rank["slice_bytes"] + CODE_BYTES
        # The floats of a packed layer are kept for the next one; the head is there twice while it is packed.
        spare_bytes = (layer_bytes + head_bytes) / rank["tp"]
        assert rank["peak_bytes"] <= 1.1 * rank["slice_bytes"] + spare_bytes + CODE_BYTES
    whole, *halves = (rank["slice_bytes"] for rank in ranks)
    norms_bytes = (2 * SHAPE.num_layers + 1) * SHAPE.hidden_size * 4
    assert whole == SHAPE.num_parameters * 4
    assert sum(halves) == whole + norms_bytes


@pytest.mark.parametrize(("tp", "why"), [("0", "tp: must be at least 1"), ("two", "tp: must be comma-separated integers")])
def test_a_number_of_ranks_that_is_none_is_refused(tmp_path: Path, tp: str, why: str) -> None:
    result = CliRunner().invoke(app, ["loading", "--model", str(tmp_path), "--tp", tp])
    assert result.exit_code == 1
    assert why in result.output


@pytest.mark.distributed
def test_a_model_that_ranks_refuse_is_refused_naming_the_file(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["loading", "--model", str(tmp_path), "--tp", "2", "--threads", "1"])
    assert result.exit_code == 1
    assert "config.json" in result.output


async def test_a_node_shows_every_phase_of_every_rank(metrics) -> None:
    page = await metrics()
    for rank in (0, 1):
        for phase in PHASES:
            name = f'ryzanstein_worker_startup_phase_seconds{{model="demo",phase="{phase}",rank="{rank}"}}'
            values = [float(line.rpartition(" ")[2]) for line in page.splitlines() if line.startswith(name)]
            assert len(values) == 1, name
            assert 0 < values[0] < 60, name
