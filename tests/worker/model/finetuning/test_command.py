"""The command as a process: what it is told, what stops it, and what it says."""

import json
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.worker.model.finetuning.conftest import COMMAND, DEMO, called, chats, command

from ryzanstein.tools.finetune.command import finetune

USUAL = ("--val", "20%", "--epochs", "5", "--batch", "4", "--rank", "4", "--learning-rate", "2e-3", "--max-length", "64")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--rank", "0"], "--rank"),
        (["--rank", "1000"], "--rank"),
        (["--alpha", "-1"], "--alpha"),
        (["--learning-rate", "2"], "--learning-rate"),
        (["--val", "0%"], "--val"),
        (["--val", "100%"], "--val"),
        (["--targets", "all,q_proj"], "--targets"),
        (["--targets", ","], "--targets"),
        (["--seed", "-1"], "--seed"),
        (["--quantization", "fp4"], "--quantization"),
        (["--compute", "half"], "--compute"),
        (["--chat-template-kwargs", "[]"], "--chat-template-kwargs"),
    ],
)
def test_wrong_usage_is_known_before_anything_is_loaded(options: list[str], named: str) -> None:
    result = called(finetune, "BASE", "DATA", "--out", "OUT", *options)
    assert (result.exit_code, named in result.output) == (2, True)


def test_the_command_imports_nothing_heavy_before_its_arguments_are_checked() -> None:
    code = (
        "import sys, ryzanstein.tools.finetune.command, ryzanstein.tools.finetune.merge_command;"
        "print(sorted({'torch', 'transformers', 'peft', 'numpy', 'tokenizers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def adapter(directory: Path) -> bytes:
    return (directory / "adapter_model.safetensors").read_bytes()


def started(*arguments: object, cwd: Path | None = None) -> subprocess.Popen[str]:
    return subprocess.Popen([*COMMAND, *map(str, arguments)], stderr=subprocess.PIPE, text=True, cwd=cwd)


def wait_for_step(process: subprocess.Popen[str], step: int) -> None:
    assert process.stderr is not None
    for line in process.stderr:
        if (match := re.match(r"step (\d+)/", line)) and int(match[1]) >= step:
            return
    pytest.fail("the training ended before it was stopped")


@pytest.mark.lab
@pytest.mark.timeout(600)
def test_a_killed_training_goes_on_to_the_same_bits(quantized: Path, data: Callable[..., Path], tmp_path: Path) -> None:
    """Killed where it may be writing: it saves after every step."""
    arguments = (quantized, data(chats(40, 1)), *USUAL, "--save-every", "0", "--validate-every", "2", "--patience", "0")
    assert command(*arguments, "--out", tmp_path / "whole").returncode == 0
    parts = tmp_path / "parts"
    process = started(*arguments, "--out", parts)
    wait_for_step(process, 6)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not parts.exists()
    assert "goes on after step" in command(*arguments, "--out", parts).stderr
    assert adapter(parts) == adapter(tmp_path / "whole")
    losses = [json.loads((path / "training.json").read_text())["losses"] for path in (parts, tmp_path / "whole")]
    assert losses[0] == losses[1]


@pytest.mark.lab
@pytest.mark.timeout(600)
def test_a_signal_ends_it_after_the_step_and_the_same_command_goes_on(data: Callable[..., Path], tmp_path: Path) -> None:
    data(chats(40, 1))
    arguments = (DEMO, "data.jsonl", *USUAL, "--validate-every", "2", "--patience", "0", "--out", "out")
    process = started(*arguments, cwd=tmp_path)
    wait_for_step(process, 2)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert re.search(r"stopped after step \d+ of 45: the same command goes on from there", said)
    done = command(*arguments, cwd=tmp_path)
    assert (done.returncode, "goes on after step" in done.stderr) == (0, True), done.stderr
    assert done.stdout == f"out: an adapter for {DEMO}\n"
    assert (tmp_path / "out/adapter_config.json").exists()


@pytest.mark.lab
@pytest.mark.timeout(600)
def test_a_full_disk_is_an_error_that_says_what_to_do(data: Callable[..., Path], tmp_path: Path) -> None:
    arguments = (DEMO, data(chats(40, 1)), *USUAL, "--save-every", "0", "--out", tmp_path / "out")

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (250_000, resource.RLIM_INFINITY))

    failed = subprocess.run(
        [*COMMAND, *map(str, arguments)], capture_output=True, text=True, timeout=100, check=False, preexec_fn=limited
    )
    assert failed.returncode == 1
    assert re.search(r"checkpoint-1: cannot be saved, [\d.]+ MB are free there", failed.stderr)
    assert "the same command goes on" in failed.stderr
    assert "Traceback" not in failed.stderr
    assert not (tmp_path / "out").exists()


def test_errors_are_lines_and_exit_code_1(data: Callable[..., Path], tmp_path: Path) -> None:
    good = data(chats(4))
    bad = data([*chats(1), {"messages": []}], "bad.jsonl")
    unwritable = tmp_path / "unwritable"
    unwritable.mkdir()
    unwritable.chmod(0o555)
    cases = [
        ((DEMO, bad, "--out", tmp_path / "out"), f"{bad}: line 2: messages must be a list with messages"),
        ((tmp_path / "absent", good, "--out", tmp_path / "out"), "No such file or directory"),
        ((DEMO, good, "--out", tmp_path), "exists already"),
    ]
    if os.geteuid():
        cases.append(((DEMO, good, "--out", unwritable / "out"), "unwritable: cannot be written"))
    before = signal.getsignal(signal.SIGINT)
    for arguments, message in cases:
        failed = called(finetune, *arguments)
        assert (failed.exit_code, message in failed.stderr) == (1, True), failed.stderr
    assert signal.getsignal(signal.SIGINT) == before
