from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ryzanstein.lab.bench.engine.__main__ import app
from ryzanstein.lab.bench.engine.suite.document import SCHEMA, read_document
from ryzanstein.lab.bench.engine.suite.engine import decode_reference

TINY = ("--models", "demo", "--tp", "1", "--batch", "1", "--prompt-tokens", "8", "--new-tokens", "4", "--buffer-mib", "1")


def suite(*arguments: str):
    return CliRunner().invoke(app, ["suite", *arguments])


@pytest.mark.distributed
def test_every_figure_of_every_round_is_written_beside_its_reference_kernel(tmp_path: Path) -> None:
    path = tmp_path / "results" / "host.json"
    done = suite(*TINY, "--rounds", "2", "--json", str(path))
    assert done.exit_code == 0, done.output
    document = read_document(path)
    assert document.schema == SCHEMA
    assert document.machine.cores == len(os.sched_getaffinity(0))
    names = [figure.name for figure in document.figures]
    assert names[:3] == [f"engine/demo/tp1/{what}" for what in ("start", "batch1/first-tokens", "batch1/decode")]
    assert {name.split("/")[0] for name in names} == {"engine", "collectives", "parts"}
    assert {len(kernel.rounds_s) for kernel in document.kernels.values()} == {2}
    for figure in document.figures:
        assert figure.reference in document.kernels
        assert len(figure.rounds) == 2
        for sample in figure.rounds:
            assert sample.ratio == pytest.approx(sample.seconds / sample.reference_s)
    assert [path.name for path in path.parent.iterdir()] == ["host.json"]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--models", "demo,XXL"], "models: must be one of demo, S"),
        (["--models", "S:int3"], "models: the format of S must be one of none, fp16, int8"),
        (["--models", "demo:"], "models: the format of demo must be one of"),
        (["--tp", "0"], "tp: must be 1 to 64"),
        (["--tp", "1,two"], "tp: must be comma-separated integers"),
        (["--batch", "0"], "batch: must be at least 1"),
        (["--prompt-tokens", "4000"], "CONTEXT_TOO_LONG"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_runs(arguments: list[str], why: str) -> None:
    done = suite("--buffer-mib", "1", "--models", "demo", *arguments)
    assert done.exit_code == 1
    assert why in done.output
    assert "machine" not in done.output


@pytest.mark.parametrize("arguments", [["--rounds", "0"], ["--rounds", "101"], ["--new-tokens", "1"], ["--buffer-mib", "-1"]])
def test_flags_out_of_range_are_usage_errors(arguments: list[str]) -> None:
    assert suite(*arguments).exit_code == 2


def test_a_model_in_other_formats_has_figures_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "formats.json"
    done = suite(*TINY, "--models", "S:q4_0,S:int8", "--rounds", "1", "--json", str(path))
    assert done.exit_code == 0, done.output
    names = [figure.name for figure in read_document(path).figures if figure.name.endswith("decode")]
    assert names == ["engine/S:q4_0/tp1/batch1/decode", "engine/S:int8/tp1/batch1/decode"]


def test_a_format_that_a_model_cannot_be_written_in_is_told() -> None:
    done = suite(*TINY, "--models", "demo:q8_0")
    assert done.exit_code == 1
    assert "demo:q8_0: " in done.output
    assert "MODEL_INVALID" in done.output


def test_models_that_no_cache_holds_are_compared_with_reading_memory(tmp_path: Path) -> None:
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(2**20)
        assert decode_reference(tmp_path) == "small"
        file.truncate(2**40)  # a hole, no bytes on disk
        assert decode_reference(tmp_path) == "read"


def test_the_machines_ceilings_are_measured_with_one_thread_and_with_all() -> None:
    done = CliRunner().invoke(app, ["machine", "--rounds", "1", "--buffer-mib", "4", "--json", "-"])
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    assert [row["threads"] for row in document["ceilings"]] == sorted({1, len(os.sched_getaffinity(0))})
    for row in document["ceilings"]:
        assert row["buffer_bytes"] == 4 * 2**20
        assert min(row["read_bytes_per_s"], row["matmul_flops_per_s"]) > 0
    assert document["machine"]["cpu"]
