"""`ryzanstein bench quality` on small models: every row is really run."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from ryzanstein.lab.bench.engine.__main__ import app

SMALL = ("--tokens", "90", "--window", "40", "--prompts", "2", "--prompt-tokens", "20", "--new-tokens", "6",
         "--prefill-tokens", "30", "--rounds", "2", "--threads", "1")  # fmt: skip


@pytest.fixture(scope="module")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("texts") / "prose"
    path.write_text("The quick brown fox jumps over the lazy dog, and 17 others do not. " * 20)
    return path


@pytest.fixture(scope="module")
def measured(small: Path, small_q8_0: Path, text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quality")
    done = quality(folder, "--model", str(small), "--model", str(small_q8_0), "--text", str(text_file), "--text", "program")
    assert done.exit_code == 0, done.output
    return folder


def quality(folder: Path, *arguments: str) -> Any:
    ends = ("--json", str(folder / "quality.json"), "--report", str(folder / "quality.md"))
    return CliRunner().invoke(app, ["quality", *SMALL, *ends, *arguments])


def document(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "quality.json").read_text())


def test_a_directory_has_a_row_for_each_format_and_a_file_has_one(measured: Path, small_q8_0: Path) -> None:
    found = document(measured)
    assert found["settings"]["reference"] == "small, none"
    names = ["small, none", "small, fp16", "small, int8", "small-q8_0.gguf, none"]
    assert [row["name"] for row in found["rows"]] == names
    for row in found["rows"]:
        assert set(row["texts"]) == {"prose", "program"}
        for windows in row["texts"].values():
            assert sum(count for count, _, _, _ in windows) == 90 - 3  # no special token begins a window
        assert len(row["greedy"]) == 4
        assert len(row["prefill_s"]) == len(row["decode_s"]) == 2
        assert min(row["prefill_s"] + row["decode_s"]) > 0
    sizes = [row["memory_bytes"] for row in found["rows"]]
    assert sizes[0] > sizes[1] > sizes[2] > 0
    assert found["rows"][3]["file_bytes"] == small_q8_0.stat().st_size
    assert found["failed"] == {}


def test_a_format_that_the_engine_chooses_has_the_figures_of_that_format(
    measured: Path, small: Path, text_file: Path, tmp_path: Path
) -> None:
    shutil.copy(measured / "quality.json", tmp_path)
    done = quality(tmp_path, "--model", str(small), "--formats", "auto", "--text", str(text_file), "--text", "program")
    assert done.exit_code == 0, done.output
    auto = document(tmp_path)["rows"][-1]
    assert auto["name"] == "small, auto"
    assert any(
        (auto["texts"], auto["memory_bytes"]) == (row["texts"], row["memory_bytes"]) for row in document(measured)["rows"]
    )


def test_the_reference_agrees_with_itself_and_formats_are_the_worse_the_fewer_their_bits(measured: Path) -> None:
    none, fp16, int8, q8_0 = (sum(one[2] for one in row["texts"]["prose"]) for row in document(measured)["rows"])
    assert none == 0
    assert 0 < fp16 < q8_0 < int8
    assert all(until == same == 6 for until, same in document(measured)["rows"][0]["greedy"])


def test_the_report_has_the_figures_of_the_document(measured: Path) -> None:
    report = (measured / "quality.md").read_text()
    rows = document(measured)["rows"]
    for row in rows:
        assert f"| {row['name']} |" in report
    losses = [one[1] for one in rows[2]["texts"]["prose"]]
    counts = [one[0] for one in rows[2]["texts"]["prose"]]
    (visible,) = re.findall(r"^\| small, int8 \| ([\d.]+) ± [\d.]+ \([+-][\d.]+ ± [\d.]+ %\) \|", report, flags=re.MULTILINE)
    assert float(visible) == pytest.approx(math.exp(sum(losses) / sum(counts)), rel=0.01)
    assert "90 tokens of each, in windows of 40" in report
    assert "prose (" in report
    assert "program (debconf)" in report


def test_a_measurement_that_was_interrupted_is_continued(measured: Path, small: Path, text_file: Path, tmp_path: Path) -> None:
    shutil.copy(measured / "quality.json", tmp_path)
    before = document(tmp_path)
    changed = document(tmp_path)
    del changed["rows"][2]["texts"]["program"]
    changed["rows"][2]["decode_s"] = []
    changed["rows"][1]["greedy"] = []
    (tmp_path / "quality.json").write_text(json.dumps(changed))
    done = quality(tmp_path, "--model", str(small), "--text", str(text_file), "--text", "program")
    assert done.exit_code == 0, done.output
    assert "together: small, fp16; small, int8" in done.output
    assert re.findall(r"(\w+): window 1 of", done.output) == ["program"]
    after = document(tmp_path)
    assert [row["texts"] for row in after["rows"]] == [row["texts"] for row in before["rows"][:3]]
    assert [row["greedy"] for row in after["rows"]] == [row["greedy"] for row in before["rows"][:3]]
    assert after["rows"][1]["decode_s"] == before["rows"][1]["decode_s"]


def test_a_document_of_other_settings_is_not_mixed_with_new_rows(measured: Path, small: Path, tmp_path: Path) -> None:
    shutil.copy(measured / "quality.json", tmp_path)
    done = quality(tmp_path, "--model", str(small), "--text", "program")
    assert done.exit_code == 1
    assert "json: has other settings or texts" in done.output
    (tmp_path / "quality.json").write_text('{"schema": "other"}')
    assert "missing required field" in quality(tmp_path, "--model", str(small), "--text", "program").output


def test_a_changed_file_is_measured_again(
    measured: Path, small: Path, small_q8_0: Path, text_file: Path, tmp_path: Path
) -> None:
    shutil.copy(measured / "quality.json", tmp_path)
    changed = document(tmp_path)
    changed["rows"][3]["files"] = "small-q8_0.gguf:1:1"
    (tmp_path / "quality.json").write_text(json.dumps(changed))
    arguments = ("--model", str(small), "--model", str(small_q8_0), "--text", str(text_file), "--text", "program")
    assert "together: small-q8_0.gguf, none" in quality(tmp_path, *arguments).output


def test_a_row_that_is_refused_is_named_and_the_others_are_measured(small: Path, text_file: Path, tmp_path: Path) -> None:
    broken, other = tmp_path / "broken.gguf", tmp_path / "other"
    broken.write_bytes(b"GGUF" + bytes(50))
    shutil.copytree(small, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"vocab_size": 300}))
    infinite = tmp_path / "infinite"
    shutil.copytree(small, infinite)
    weights = load_file(infinite / "model.safetensors")
    weights["model.norm.weight"][0] = torch.inf
    save_file(weights, infinite / "model.safetensors", {"format": "pt"})
    models = (argument for path in (small, broken, infinite, other) for argument in ("--model", str(path)))
    done = quality(tmp_path, *models, "--formats", "none", "--text", str(text_file))
    assert done.exit_code == 1
    found = document(tmp_path)
    assert [row["name"] for row in found["rows"]] == ["small, none"]
    assert set(found["failed"]) == {"broken.gguf, none", "infinite, none", "other, none"}
    assert found["failed"]["infinite, none"] == "text prose: logits are not finite"
    assert "Not measured: broken.gguf, none:" in (tmp_path / "quality.md").read_text()
    alone = quality(tmp_path / "alone", "--model", str(infinite), "--formats", "none", "--text", str(text_file))
    assert alone.exit_code == 1
    assert "(MODEL_INVALID)" in alone.output
    assert "infinite: text prose: logits are not finite" in alone.output


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--formats", "int3"], "formats: must be any of none,"),
        (["--peers", "vllm"], "peers: must be llama.cpp"),
        (["--peers", "llama.cpp", "--judges", "/nowhere"], "judges: /nowhere/bin/python is missing"),
        (["--window", "513"], "window: must be at most 512, the context of the reference, got 513"),
        (["--prompt-tokens", "91"], "prompt-tokens: must be at most 90"),
        (["--text", "program", "--text", "program"], "text: each needs a name of its own"),
        (["--json", "-"], "json: must be the path of a file, got '-'"),
        (["--report", "/tmp"], "report: must be the path of a file"),
        (["--tokens", "9000000"], "text prose: must have at least the 9000000 tokens"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_runs(
    arguments: list[str], why: str, small: Path, text_file: Path, tmp_path: Path
) -> None:
    done = quality(tmp_path, "--model", str(small), "--text", str(text_file), *arguments)
    assert done.exit_code == 1
    assert why in done.output
    assert not (tmp_path / "quality.json").exists()


@pytest.mark.parametrize("chosen", ["nothing", "empty", "file"])
def test_the_first_model_is_a_directory_of_float_weights(
    chosen: str, small_q8_0: Path, text_file: Path, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    model = small_q8_0 if chosen == "file" else tmp_path / chosen
    done = quality(tmp_path, "--model", str(model), "--text", str(text_file))
    assert done.exit_code == 1
    assert "error INVALID_ARGUMENT (INVALID_ARGUMENT): model: " in done.output
