from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import ryzanstein.demo
from ryzanstein.lab.bench.engine.__main__ import app
from ryzanstein.lab.bench.engine.collectives.command import choose_sizes

DEMO = str(next(iter(ryzanstein.demo.__path__)))
FACTORS = {"all_reduce": 1.0, "all_gather": 0.5, "broadcast": 1.0}


def bench(*arguments: str):
    return CliRunner().invoke(app, ["collectives", "--rounds", "1", "--seconds", "0.01", *arguments])


@pytest.mark.distributed
def test_each_backend_is_measured_with_each_operation_and_size(tmp_path: Path) -> None:
    path = tmp_path / "collectives.json"
    result = bench("--sizes", "8,3MiB", "--backends", "shm,gloo", "--json", str(path))
    assert result.exit_code == 0, result.output
    document = json.loads(path.read_text())
    assert set(document) == {"results"}
    cells = {(row["backend"], row["op"], row["ranks"], row["bytes"]) for row in document["results"]}
    assert cells == {(b, op, 2, size) for b in ("shm", "gloo") for op in FACTORS for size in (8, 3 * 2**20)}
    for row in document["results"]:
        assert set(row) == {"backend", "op", "ranks", "bytes", "p50_s", "p99_s", "bus_bytes_per_s"}
        assert 0 < row["p50_s"] <= row["p99_s"]
        assert row["bus_bytes_per_s"] == pytest.approx(FACTORS[row["op"]] * row["bytes"] / row["p50_s"])


@pytest.mark.distributed
def test_what_cannot_run_here_is_left_out_by_name_with_its_reason() -> None:
    result = bench("--ranks", "2", "--ops", "broadcast", "--sizes", "8KiB", "--json", "-")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert "torch" in document["absent"]["symm_mem"]
    assert "left out: symm_mem needs symmetric memory" in result.stderr
    measured = {row["backend"] for row in document["results"]}
    assert {"shm", "gloo"} <= measured
    assert measured.isdisjoint(document["absent"])


@pytest.mark.distributed
def test_a_models_decode_steps_have_their_share_of_communication() -> None:
    cell = ("--ops", "all_reduce", "--sizes", "8KiB", "--backends", "shm", "--pin")
    result = bench(*cell, "--model", DEMO, "--steps", "16", "--json", "-")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["model"] == DEMO
    assert [(row["backend"], row["batch"]) for row in document["decode_share"]] == [("shm", 1), ("shm", 8)]
    for row in document["decode_share"]:
        assert row["step_p50_s"] > 0
        assert 0 < row["communication_share"] < 1


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--ops", "all_reduce,all_to_all"], "ops: must be one of all_reduce, all_gather, broadcast"),
        (["--backends", "mpi"], "backends: must be one of shm, gloo, nccl, symm_mem"),
        (["--backends", "nccl", "--ranks", "64"], "backends: nccl needs a CUDA device for each of 64 ranks"),
        (["--backends", "symm_mem"], "backends: symm_mem needs symmetric memory"),
        (["--sizes", "4B"], "sizes: must be at least 8 bytes for 2 ranks"),
        (["--sizes", "8kb"], "sizes: must be like"),
        (["--model", DEMO, "--steps", "1000000"], "context"),
    ],
)
def test_what_cannot_be_measured_is_refused(arguments: list[str], why: str) -> None:
    result = bench(*arguments)
    assert result.exit_code == 1
    assert "INVALID_ARGUMENT" in result.output
    assert why in result.output


@pytest.mark.parametrize("arguments", [["--ranks", "1"], ["--threads", "0"], ["--seconds", "-1"], ["--model", "/nowhere"]])
def test_flags_out_of_range_are_usage_errors(arguments: list[str]) -> None:
    assert bench(*arguments).exit_code == 2


def test_a_directory_without_a_model_is_refused_before_anything_runs(tmp_path: Path) -> None:
    result = bench("--model", str(tmp_path))
    assert result.exit_code == 1
    assert "config.json" in result.output
    assert "round" not in result.output


def test_sizes_are_rounded_down_to_elements_that_divide_over_the_ranks() -> None:
    assert choose_sizes("2KiB..8KiB", 2) == (2048, 4096, 8192)
    assert choose_sizes("2048,2050,100", 3) == (96, 2040)
