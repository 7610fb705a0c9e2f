"""The command with peers: real ranks, the project's own transformers as a peer, others that are not there or broken."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ryzanstein.lab.bench.engine.__main__ import app
from ryzanstein.lab.bench.engine.peers.catalog import PEERS
from ryzanstein.lab.bench.engine.peers.checkpoint import checkpoint

LOADS = ("--batch", "1,3", "--prompt-tokens", "20", "--new-tokens", "4", "--prefill-tokens", "40")
SIZE = (*LOADS, "--rounds", "1", "--threads", "1")
ROW_KEYS = {
    "engine", "quantization", "tp", "batch", "prompt_tokens", "new_tokens",
    "total_tokens_per_s", "decode_tokens_per_s", "ttft_s", "peak_rss_bytes", "cpu_s", "share_of_bandwidth",
    "first_tokens_equal", "rounds",
}  # fmt: skip


def interpreter(peers_dir: Path, name: str, body: str) -> None:
    """A peer's `bin/python` that is this shell script."""
    path = peers_dir / name / "bin" / "python"
    path.parent.mkdir(parents=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> dict:
    folder = tmp_path_factory.mktemp("peers")
    interpreter(folder, "transformers", f'exec {sys.executable} "$@"')
    interpreter(folder, "vllm", 'echo "first line" >&2; echo "no such instruction" >&2; exit 3')
    arguments = ("--model", "demo", "--peers", "--peers-dir", str(folder), "--json", str(folder / "result.json"))
    result = CliRunner().invoke(app, ["engine", *arguments, *SIZE])
    assert result.exit_code == 0, result.output
    return json.loads((folder / "result.json").read_text())


@pytest.mark.distributed
def test_ours_and_the_installed_peer_have_a_row_for_each_batch(document) -> None:
    assert [(row["engine"], row["batch"], row["prompt_tokens"]) for row in document["results"]] == [
        ("ryzanstein", 1, 20),
        ("ryzanstein", 3, 20),
        ("ryzanstein", 1, 40),
        ("transformers", 1, 20),
        ("transformers", 3, 20),
        ("transformers", 1, 40),
    ]
    for row in document["results"]:
        assert set(row) == ROW_KEYS
        assert [done["round"] for done in row["rounds"]] == [0]
        assert min(row["total_tokens_per_s"], row["ttft_s"]) > 0
        assert (row["decode_tokens_per_s"] > 0) == (row["new_tokens"] > 1)
        assert row["peak_rss_bytes"] > 10 * 2**20
        assert row["cpu_s"] > 0


@pytest.mark.distributed
def test_a_peer_in_full_precision_begins_its_answers_as_we_do(document) -> None:
    assert {row["first_tokens_equal"] for row in document["results"]} == {1.0}


@pytest.mark.distributed
def test_there_is_a_ratio_for_each_batch_within_its_rounds_bounds(document) -> None:
    rows = document["ratios"]
    assert [(ratio["engine"], ratio["peer"]["engine"], ratio["batch"], ratio["new_tokens"]) for ratio in rows] == [
        ("ryzanstein", "transformers", 1, 4),
        ("ryzanstein", "transformers", 3, 4),
        ("ryzanstein", "transformers", 1, 1),
    ]
    for ratio in document["ratios"]:
        assert ratio["rounds"] == 1
        for spread in (ratio["total_tokens_per_s"], ratio["ttft"], ratio["peak_rss"]):
            assert 0 < spread["min"] <= spread["median"] <= spread["max"]


@pytest.mark.distributed
def test_what_is_not_installed_is_absent_and_not_beaten(document) -> None:
    absent = {(row["engine"], row["quantization"]): row["reason"] for row in document["absent"] if row["tp"] == 1}
    missing = [peer for peer in PEERS if peer.environment not in ("transformers", "vllm")]
    assert absent.keys() == {(peer.engine, peer.quantization) for peer in missing}
    assert all("not installed" in reason for reason in absent.values())


@pytest.mark.distributed
def test_a_peer_of_more_ranks_than_threads_is_absent(document) -> None:
    reasons = [row["reason"] for row in document["absent"] if (row["engine"], row["tp"]) == ("vllm", 2)]
    assert reasons == ["2 ranks need at least 2 threads, got 1"]


@pytest.mark.distributed
def test_a_peer_that_crashes_has_failed_with_its_last_line_and_the_others_go_on(document) -> None:
    failed = [(row["engine"], row["tp"], row["reason"]) for row in document["failed"]]
    assert failed == [("vllm", 1, "ended with 3: no such instruction")]


@pytest.mark.distributed
def test_the_document_says_what_was_run_on_what(document) -> None:
    assert document["facts"]["transformers none tp 1"].keys() == {"transformers", "torch", "precision"}
    assert document["threads"] == 1
    assert document["machine"]["cores"]


@pytest.mark.distributed
def test_a_file_is_served_as_it_is_and_compared_with_what_reads_it(tmp_path: Path) -> None:
    interpreter(tmp_path, "llama-cpp", 'echo "no such library" >&2; exit 3')
    checkpoint("S", tmp_path / "ryzanstein")
    where = ("--peers-dir", str(tmp_path), "--cache-home", str(tmp_path))
    arguments = ("--model", "S", "--gguf", "q8_0", "--peers", *where, "--json", "-")
    result = CliRunner().invoke(app, ["engine", *arguments, *SIZE])
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    [file] = tmp_path.glob("models/*/q8_0.gguf")
    assert document["model"] == str(file)
    assert {(row["engine"], row["quantization"]) for row in document["results"]} == {("ryzanstein", "gguf")}
    assert [(row["engine"], row["reason"]) for row in document["failed"]] == [("llama.cpp", "ended with 3: no such library")]
    assert [(row["engine"], row["quantization"]) for row in document["absent"]] == [("openvino", "int4")]
    footprint = document["footprints"]["ryzanstein gguf tp 1"]
    assert document["footprints"]["llama.cpp gguf tp 1"]["step_bytes"] == footprint["step_bytes"]
    assert 0.5 * file.stat().st_size < footprint["step_bytes"] < file.stat().st_size < footprint["memory_bound_bytes"]
    first = document["results"][0]
    share = first["decode_tokens_per_s"] * footprint["step_bytes"] / document["read_bytes_per_s"][0]
    assert first["share_of_bandwidth"] == pytest.approx(share)


def test_a_file_is_not_converted_again(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    result = CliRunner().invoke(app, ["engine", "--model", str(file), "--gguf", "q4_0", "--peers-dir", str(tmp_path)])
    assert (result.exit_code, list(tmp_path.iterdir())) == (1, [file])
    assert "gguf: must be empty for a model that is a file" in result.output


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--only", "abacus"], "only: must be one of transformers"),
        (["--tp", "1,x"], "tp: must be comma-separated integers"),
        (["--tp", "0"], "tp: must be 1 to"),
        (["--quantization", "none,int3"], "quantization: must be one of none, fp16, int8"),
        (["--gguf", "q3_0"], "gguf: must be one of f32, f16"),
    ],
)
def test_what_cannot_be_compared_is_refused(arguments, why, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["engine", "--model", "demo", "--peers", "--peers-dir", str(tmp_path), *arguments])
    assert result.exit_code == 1
    assert why in result.output


def test_a_model_that_is_neither_name_nor_directory_nor_file_is_refused(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["engine", "--model", str(tmp_path / "none")])
    assert result.exit_code == 1
    assert "model: must be a directory, a GGUF file or one of demo, S" in result.output
