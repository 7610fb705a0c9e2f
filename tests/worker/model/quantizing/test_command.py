"""The command `ryzanstein quantize`: exit codes, what it refuses, and going on after it was stopped."""

import json
import os
import resource
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from .conftest import COMMAND, CONTEXT, run

LAYERS = 4


@pytest.fixture(scope="module")
def deep(tiny: Callable[..., Path]) -> Path:
    return tiny("llama", num_hidden_layers=LAYERS)


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def stopped_after_a_layer(arguments: list[object], number: int) -> subprocess.Popen[str]:
    """Starts the command and sends it a signal once the first layer is done."""
    process = subprocess.Popen([*COMMAND, *map(str, arguments)], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith(f"layer 1 of {LAYERS}"):
            process.send_signal(number)
            break
    process.communicate(timeout=60)
    return process


@pytest.mark.timeout(300)  # processes, which start slowly on a machine with other load
@pytest.mark.parametrize("method", ["gptq", "auto"])
def test_a_killed_run_goes_on_and_ends_with_the_same_bytes(method: str, deep: Path, text: Path, tmp_path: Path) -> None:
    options: list[object] = [
        "--method",
        method,
        "--calibration",
        text,
        "--tokens",
        2000,
        "--budget",
        "2%" if method == "auto" else "90%",
    ]
    whole = run(deep, tmp_path / "whole", *options)
    assert (whole.returncode, whole.stdout) == (0, f"{tmp_path / 'whole'}: quantized from {deep}\n")
    killed = stopped_after_a_layer([deep, tmp_path / "model", *options], signal.SIGKILL)
    assert killed.returncode == -signal.SIGKILL
    assert not (tmp_path / "model").exists()

    other = run(deep, tmp_path / "model", *options, "--group", 16)
    assert other.returncode == 1
    assert "was left by another quantization (--group 32, now 16)" in other.stderr

    again = run(deep, tmp_path / "model", *options)
    assert again.returncode == 0
    assert f" of {LAYERS} layers are " in again.stderr
    assert f"layer 1 of {LAYERS}" not in again.stderr
    assert contents(tmp_path / "model") == contents(tmp_path / "whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "whole"]


def test_ctrl_c_keeps_what_is_done(deep: Path, text: Path, tmp_path: Path) -> None:
    stopped = stopped_after_a_layer([deep, tmp_path / "model", "--method", "gptq", "--calibration", text], signal.SIGINT)
    assert stopped.returncode == 130
    assert json.loads((tmp_path / ".model.quantizing" / "state.json").read_text())["layers"]


def test_a_full_disk_keeps_what_is_done(deep: Path, tmp_path: Path) -> None:
    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, resource.RLIM_INFINITY))

    failed = run(deep, tmp_path / "model", "--method", "rtn", preexec_fn=limited)
    assert failed.returncode == 1
    assert "File too large" in failed.stderr
    assert not (tmp_path / "model").exists()
    assert run(deep, tmp_path / "model", "--method", "rtn").returncode == 0


def test_two_processes_do_not_share_a_place(llama: Path, tmp_path: Path) -> None:
    import fcntl

    partial = tmp_path / ".model.quantizing"
    partial.mkdir()
    with (partial / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        refused = run(llama, tmp_path / "model", "--method", "rtn")
    assert refused.returncode == 1
    assert "is in use" in refused.stderr


def test_files_can_be_read_by_others(llama: Path, tmp_path: Path) -> None:
    assert run(llama, tmp_path / "model", "--method", "rtn", umask=0o027).returncode == 0
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "model").iterdir()} == {0o640}


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--method", "magic"], "--method"),
        (["--method", "rtn", "--bits", "5"], "--bits"),
        (["--method", "rtn", "--group", "33"], "--group"),
        (["--method", "rtn", "--bits", "8", "--zero-points"], "--zero-points"),
        (["--method", "gptq"], "--calibration"),
        (["--method", "rtn", "--budget", "1%"], "--budget"),
        (["--method", "auto", "--calibration", "x", "--budget", "3%"], "--budget"),
        (["--method", "auto", "--calibration", "x", "--budget", "much"], "--budget"),
        (["--method", "gptq", "--calibration", "x", "--budget", "10MB"], "--budget"),
    ],
)
def test_wrong_usage(options: list[str], named: str, tmp_path: Path) -> None:
    wrong = run(tmp_path / "source", tmp_path / "model", *options)
    assert wrong.returncode == 2
    assert named in wrong.stderr


def test_what_is_refused_leaves_nothing(llama: Path, text: Path, tmp_path: Path) -> None:
    """Each with the file, tensor or option that is wrong in the message."""
    short, latin = tmp_path / "short.txt", tmp_path / "latin.txt"
    short.write_text("too short")
    latin.write_bytes(b"caf\xe9" * 1000)
    without, broken, foreign, unread = (
        shutil.copytree(llama, tmp_path / name) for name in ("without", "broken", "foreign", "unread")
    )
    save_file(
        {**load_file(llama / "model.safetensors"), "model.layers.0.self_attn.q_proj.bias": torch.ones(64)},
        unread / "model.safetensors",
    )
    (without / "tokenizer.json").unlink()
    tensors = load_file(broken / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = torch.nan
    save_file(tensors, broken / "model.safetensors")
    (foreign / "config.json").write_text(
        json.dumps({**json.loads((llama / "config.json").read_text()), "quantization_config": {"quant_method": "awq"}})
    )
    target, gptq = tmp_path / "model", ["--method", "gptq", "--calibration"]
    cases: list[tuple[Path, Path, list[object], str]] = [
        (
            llama,
            target,
            [*gptq, short],
            f"--calibration: 0 windows of {CONTEXT} tokens, at least 8 are needed",
        ),
        (llama, target, [*gptq, latin], f"--calibration {latin}: not UTF-8"),
        (llama, target, [*gptq, tmp_path / "absent.txt"], "absent.txt: No such file"),
        (without, target, [*gptq, text], "tokenizer.json: cannot be read"),
        (broken, target, ["--method", "rtn"], "tensor model.layers.1.mlp.up_proj.weight has a NaN"),
        (unread, target, ["--method", "rtn"], "tensor model.layers.0.self_attn.q_proj.bias is not used by this architecture"),
        (foreign, target, ["--method", "rtn"], "is quantized already (quantization_config has quant_method 'awq')"),
        (llama, llama, ["--method", "rtn", "--force"], "is SRC"),
        (llama, llama.parent, ["--method", "rtn"], "exists already"),
        (tmp_path / "absent", target, ["--method", "rtn"], "config.json"),
    ]
    before = {path: path.stat().st_mtime_ns for path in llama.iterdir()}
    for source, place, options, message in cases:
        refused = run(source, place, *options)
        assert refused.returncode == 1, (message, refused.stderr)
        assert message in refused.stderr
        assert not target.exists()
        assert not list(tmp_path.glob(".*.quantizing"))
    assert {path: path.stat().st_mtime_ns for path in llama.iterdir()} == before


def test_a_model_that_is_there_is_replaced_only_if_told(llama: Path, tmp_path: Path) -> None:
    target = tmp_path / "model"
    target.mkdir()
    (target / "config.json").write_text("{}")
    refused = run(llama, target, "--method", "rtn")
    assert (refused.returncode, refused.stderr) == (1, f"{target} exists already; --force replaces it\n")
    refused = run(llama, target, "--method", "rtn", "--force")
    assert f"{target} was not written by ryzanstein" in refused.stderr
    assert [path.name for path in target.iterdir()] == ["config.json"]
    (target / "config.json").unlink()
    assert run(llama, target, "--method", "rtn").returncode == 0
    assert run(llama, target, "--method", "rtn", "--force").returncode == 0
    assert (target / "model.safetensors.index.json").exists()


def test_a_directory_in_src_and_no_tokenizer(llama: Path, tmp_path: Path) -> None:
    source = shutil.copytree(llama, tmp_path / "source")
    for name in os.listdir(source):
        if "tokenizer" in name:
            (source / name).unlink()
    assert run(source, source / "int8", "--method", "int8").returncode == 0
    assert sorted(path.name for path in source.iterdir()) == [
        "config.json",
        "generation_config.json",
        "int8",
        "model.safetensors",
    ]
