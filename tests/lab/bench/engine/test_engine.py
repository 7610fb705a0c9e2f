from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import ryzanstein.demo
from ryzanstein.lab.bench.engine.__main__ import app

DEMO = str(next(iter(ryzanstein.demo.__path__)))
KEYS = {
    "engine", "quantization", "tp", "batch", "prompt_tokens", "new_tokens",
    "total_tokens_per_s", "decode_tokens_per_s", "ttft_s", "peak_rss_bytes",
}  # fmt: skip


def bench(*arguments: str):
    return CliRunner().invoke(app, ["engine", "--model", DEMO, "--threads", "1", *arguments])


@pytest.mark.distributed
@pytest.mark.parametrize("tp", [1, 2])
def test_the_demo_model_is_measured_at_each_batch_size(tp, tmp_path: Path) -> None:
    size = ("--prompt-tokens", "20", "--new-tokens", "6", "--rounds", "1")
    result = bench("--batch", "2,3", "--tp", str(tp), "--json", str(tmp_path / "engine.json"), *size)
    assert result.exit_code == 0, result.output
    document = json.loads((tmp_path / "engine.json").read_text())
    assert document["model"] == DEMO
    assert [(row["tp"], row["batch"], row["new_tokens"]) for row in document["results"]] == [(tp, 2, 6), (tp, 3, 6)]
    for row in document["results"]:
        assert set(row) == KEYS
        assert min(row["total_tokens_per_s"], row["decode_tokens_per_s"], row["ttft_s"]) > 0
        assert row["peak_rss_bytes"] > 10 * 2**20


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--prompt-tokens", "4000"], "CONTEXT_TOO_LONG"),
        (["--batch", "1,x"], "batch: must be comma-separated integers"),
        (["--batch", "0"], "batch: must be at least 1"),
    ],
)
def test_what_cannot_be_measured_is_refused(arguments, why) -> None:
    result = bench(*arguments)
    assert result.exit_code == 1
    assert why in result.output


def test_a_directory_without_a_model_is_refused_naming_the_file(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["engine", "--model", str(tmp_path)])
    assert result.exit_code == 1
    assert "config.json" in result.output
