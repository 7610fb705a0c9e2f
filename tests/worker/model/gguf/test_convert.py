"""The command `ryzanstein convert`: what it writes, what it refuses, and that nothing is left of what fails."""

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ryzanstein.tools.convert.from_checkpoint import WRITTEN, to_file
from ryzanstein.tools.convert.to_checkpoint import to_directory
from ryzanstein.tools.synthesize.command import Recipe, synthesize
from ryzanstein.tools.synthesize.shapes import ModelShape
from ryzanstein.worker.checkpoints.gguf.file import GgufFile
from ryzanstein.worker.kernels.functions.block_types import F32
from ryzanstein.worker.refusal import CheckpointError
from ryzanstein.worker.text.tokenizer import TextModel

pytestmark = pytest.mark.long

COMMAND = [sys.executable, "-m", "ryzanstein.tools.convert.command"]
WITHIN_S = 60


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """8 MB, which take seconds as k-quants."""
    directory = tmp_path_factory.mktemp("source") / "model"
    directory.mkdir()
    synthesize(directory, Recipe("llama", ModelShape(256, 4, 4, 2, 768, 4096), "float32", seed=0, num_files=2))
    return directory


def convert(*arguments: object, limit_bytes: int | None = None) -> subprocess.CompletedProcess[str]:
    """Runs the command; `limit_bytes` is the largest file that it can write.

    A function run between fork and exec would be simpler than prlimit(1), but gRPC's handlers of fork abort if another test of
    this process has just ended a server.
    """
    limit = [] if limit_bytes is None else ["prlimit", f"--fsize={limit_bytes}"]
    command = [*limit, *COMMAND, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=WITHIN_S, check=False)


def test_both_ways(model_dir: Path, tmp_path: Path) -> None:
    there = convert(model_dir, tmp_path / "model.gguf", "--type", "q8_0")
    assert (there.returncode, there.stdout) == (0, f"{tmp_path / 'model.gguf'}: converted from {model_dir}\n")
    assert "100 %: " in there.stderr
    back = convert(tmp_path / "model.gguf", tmp_path / "model", "--dtype", "float32")
    assert back.returncode == 0
    assert sorted(path.name for path in (tmp_path / "model").iterdir()) == [
        ".written-by-ryzanstein",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "model.gguf"]


def test_what_it_wrote_is_replaced_only_if_told(model_dir: Path, tmp_path: Path) -> None:
    target, directory = tmp_path / "model.gguf", tmp_path / "model"
    assert convert(model_dir, target, "--type", "f32").returncode == 0
    refused = convert(model_dir, target)
    assert (refused.returncode, refused.stderr) == (1, f"{target} exists already; --force replaces it\n")
    assert convert(model_dir, target, "--force").returncode == 0
    with GgufFile.open(target) as file:
        assert file.tensor("output.weight").type.name == "BF16"
    assert convert(target, directory).returncode == 0
    assert convert(target, directory).returncode == 1
    assert convert(target, directory, "--dtype", "float32", "--force").returncode == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "model.gguf"]


def test_what_somebody_else_wrote_is_never_replaced(model_dir: Path, tmp_path: Path) -> None:
    source, directory = tmp_path / "model.gguf", tmp_path / "model"
    assert convert(model_dir, source).returncode == 0
    assert convert(source, directory).returncode == 0
    (directory / "notes").mkdir()
    (directory / "thesis.txt").write_text("years")
    (directory / "tokenizer_config.json").write_text("{}")
    refused = convert(source, directory, "--force")
    assert (refused.returncode, refused.stderr.count("\n")) == (1, 1)
    assert "(notes, thesis.txt, tokenizer_config.json), and is not replaced" in refused.stderr
    assert (directory / "thesis.txt").read_text() == "years"

    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "config.json").write_text("{}")
    refused = convert(source, theirs, "--force")
    assert (refused.returncode, refused.stderr.count("\n")) == (1, 1)
    assert f"{theirs} was not written by ryzanstein" in refused.stderr
    assert [path.name for path in theirs.iterdir()] == ["config.json"]


def test_a_file_that_is_no_gguf_file_is_never_replaced(model_dir: Path, tmp_path: Path) -> None:
    target = tmp_path / "letter"
    target.write_bytes(b"mine")
    os.mkfifo(tmp_path / "pipe")
    for path in (target, tmp_path / "pipe"):
        refused = convert(model_dir, path, "--force")
        assert (refused.returncode, refused.stderr.count("\n")) == (1, 1)
        assert "is not a GGUF file and is not replaced" in refused.stderr
    assert target.read_bytes() == b"mine"


@pytest.mark.parametrize("way", ["to a file", "to a directory"])
def test_a_full_disk_leaves_nothing(way: str, model_dir: Path, tmp_path: Path) -> None:
    """A limit of a file's size fails a write as a full disk does."""
    source = model_dir
    if way == "to a directory":
        source = model_dir.parent / "source.gguf"
        assert source.exists() or convert(model_dir, source).returncode == 0
    failed = convert(source, tmp_path / "target", limit_bytes=2**21)
    assert failed.returncode == 1
    assert "File too large" in failed.stderr
    assert "Traceback" not in failed.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_leaves_nothing(number: signal.Signals, model_dir: Path, tmp_path: Path) -> None:
    process = subprocess.Popen(
        [*COMMAND, model_dir, tmp_path / "model.gguf", "--type", "q4_k"], stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + WITHIN_S
    while not any(tmp_path.iterdir()):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(number)
    _, printed = process.communicate(timeout=WITHIN_S)
    assert (process.returncode, "interrupted: nothing was written" in printed) == (130, True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--type", "q9_z"], 2, "'q9_z' is not supported"),
        (["--dtype", "float32"], 2, "has no meaning when SRC is a directory"),
    ],
)
def test_wrong_options_are_named(arguments: list[str], code: int, message: str, model_dir: Path, tmp_path: Path) -> None:
    found = convert(model_dir, tmp_path / "model.gguf", *arguments)
    assert (found.returncode, message in found.stderr) == (code, True)


def test_a_wrong_file_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "odd.gguf").write_bytes(b"GGUF\1\0\0\0" + bytes(64))
    for source in ("odd.gguf", "missing.gguf"):
        refused = convert(tmp_path / source, tmp_path / "model")
        assert refused.returncode == 1
        assert refused.stderr.startswith(str(tmp_path / source))
    assert [path.name for path in tmp_path.iterdir()] == ["odd.gguf"]


@pytest.mark.parametrize("method", ["gptq", "compressed-tensors", "quanto"])
def test_a_model_that_is_quantized_already_is_refused_by_its_method(
    method: str, model_dir: Path, tmp_path: Path, edit_json: Callable[..., None]
) -> None:
    source = Path(shutil.copytree(model_dir, tmp_path / "source"))
    edit_json(source / "config.json", quantization_config={"quant_method": method})
    with pytest.raises(CheckpointError, match=rf"source/config\.json: .* quantized already .*quant_method '{method}'"):
        to_file(source, tmp_path / "model.gguf", WRITTEN["q8_0"], io.StringIO())
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_parent_that_is_missing_is_named(model_dir: Path, tmp_path: Path) -> None:
    refused = convert(model_dir, tmp_path / "no" / "model.gguf")
    assert (refused.returncode, refused.stderr) == (1, f"{tmp_path / 'no'} is not a directory\n")


def test_no_more_than_a_window_of_a_tensor_is_in_memory(model_dir: Path, tmp_path: Path) -> None:
    """A model six times as large needs little more; a float32 copy of it would take 120 MB."""
    large = tmp_path / "large"
    large.mkdir()
    synthesize(large, Recipe("llama", ModelShape(512, 4, 4, 2, 1536, 16384), "bfloat16", seed=0, num_files=1))
    peaks = [_peak(directory, tmp_path / f"{directory.name}.gguf") for directory in (model_dir, large)]
    assert peaks[1] - peaks[0] < 60 * 2**20


def _peak(source: Path, target: Path) -> int:
    script = (
        "import io, resource, sys; from pathlib import Path\n"
        "from ryzanstein.tools.convert.from_checkpoint import WRITTEN, to_file\n"
        "to_file(Path(sys.argv[1]), Path(sys.argv[2]), WRITTEN['f32'], io.StringIO())\n"
        "print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * 1024)\n"
    )
    command = [sys.executable, "-c", script, str(source), str(target)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WITHIN_S, check=True, env=dict(os.environ))
    return int(done.stdout)


def test_sampling_defaults_go_both_ways(model_dir: Path, tmp_path: Path) -> None:
    """As llama.cpp has them in its metadata, in float32: 0.95 stays 0.95."""
    path, message = model_dir / "generation_config.json", {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
    whole = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**whole, **message, "repetition_penalty": 1.1, "do_sample": True}))
    file, back = tmp_path / "model.gguf", tmp_path / "back"
    to_file(model_dir, file, WRITTEN["f32"], io.StringIO())
    assert TextModel.load(file).sampling_defaults.given == {**message, "repetition_penalty": 1.1}
    to_directory(file, back, F32, io.StringIO())
    found = json.loads((back / "generation_config.json").read_text())
    assert {name: found[name] for name in (*message, "repetition_penalty")} == {**message, "repetition_penalty": 1.1}
