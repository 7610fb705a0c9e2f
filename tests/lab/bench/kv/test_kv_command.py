"""`ryzanstein bench kv` on a small model: every option is really run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ryzanstein.demo import MODEL_DIR
from ryzanstein.lab.bench.engine.__main__ import app
from ryzanstein.lab.bench.kv.options import OPTIONS

SMALL = ("--windows", "64,150", "--every", "2", "--prompts", "1", "--prompt-tokens", "60", "--new-tokens", "12",
         "--pass-keys", "300", "--batches", "1,2", "--contexts", "64", "--threads", "1")  # fmt: skip


def kv(path: Path, *arguments: str) -> Any:
    command = ["kv", *SMALL, "--model", str(MODEL_DIR), "--text", "program", "--json", str(path), *arguments]
    return CliRunner().invoke(app, command)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Half of the parts first, then all."""
    path = tmp_path_factory.mktemp("kv") / "kv.json"
    begun = kv(path, "--parts", "memory,outliers")
    assert begun.exit_code == 0, begun.output
    done = kv(path)
    assert done.exit_code == 0, done.output
    return path, done.stdout


def columns(document: Any) -> Sequence[Sequence[Sequence[float]]]:
    return [row["sums"] for row in document["windows"]]


@pytest.mark.long
def test_every_option_is_measured_and_loses_little(measured: tuple[Path, str]) -> None:
    document = json.loads(measured[0].read_text())
    assert document["settings"]["options"] == [option.name for option in OPTIONS]
    assert [row["length"] for row in document["windows"]] == [64, 150]
    for sums in columns(document):
        assert len(sums) == len(OPTIONS)
        assert len({count for count, *_ in sums}) == 1
        assert sums[0][2] == 0  # no divergence from itself
        for _, loss, divergence, same in sums[1:]:
            assert abs(loss - sums[0][1]) < 0.1 * sums[0][1]
            assert 0 <= divergence < 0.1 * sums[0][1]
            assert same > 0
    assert all(divergence > 0 for _, _, divergence, _ in columns(document)[1][1:])  # pages of each are cold
    sizes = [row["bytes_per_token"] for row in document["memory"]]
    assert sizes[1] == sizes[0] / 2
    assert sizes[3] < 0.6 * sizes[1]
    assert all(row["matches"][0] == [12, 12] for row in document["greedy"])
    assert {(row["batch"], row["context"]) for row in document["times"]} == {(1, 64), (2, 64)}
    assert [len(row["found"]) for row in document["pass_keys"]] == [len(OPTIONS)] * 3


def test_a_huge_channel_costs_keys_with_one_scale_more_than_those_with_a_scale_each(measured: tuple[Path, str]) -> None:
    errors = json.loads(measured[0].read_text())["outliers"][2]["errors"]
    assert errors["float32"] < 1e-5
    assert errors["int8"] > 3 * errors["FP8 values"]
    assert errors["int8 channels"] < 1.5 * errors["FP8 values"]


def test_the_tables_have_a_row_for_each_option(measured: tuple[Path, str]) -> None:
    for option in OPTIONS:
        assert f"| {option.name} |" in measured[1]


def test_what_is_there_is_not_measured_again_and_other_settings_are_refused(measured: tuple[Path, str]) -> None:
    before = json.loads(measured[0].read_text())
    assert kv(measured[0]).exit_code == 0
    assert json.loads(measured[0].read_text()) == before
    refused = kv(measured[0], "--every", "3")
    assert refused.exit_code == 1
    assert "other settings" in refused.output


@pytest.mark.parametrize(
    ("arguments", "named"),
    [(("--parts", "size"), "parts"), (("--options", "D"), "options"), (("--windows", "0"), "windows")],
)
def test_what_it_does_not_know_is_refused_by_name(tmp_path: Path, arguments: tuple[str, str], named: str) -> None:
    done = kv(tmp_path / "kv.json", *arguments)
    assert done.exit_code == 1
    assert named in done.output
