"""Servers that the agent starts: nothing of them outlives it, and what they leave in shared memory is removed."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from pydantic import ValidationError

from ryzanstein.worker.config import WorkerSettings
from ryzanstein.worker.engines.child import keeper
from ryzanstein.worker.engines.child.command import vllm_command, vllm_environment
from ryzanstein.worker.engines.child.litter import present, remove_new

SERVER = """
import os, subprocess, sys, time
with open(f"/dev/shm/ryzanstein-test-{os.getpid()}", "wb") as file:
    file.truncate(4096)
helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
if os.fork() == 0:
    os.setsid()
    orphan = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    print(helper.pid, orphan.pid, file.name, flush=True)
    os._exit(0)
os.wait()
time.sleep(float(sys.argv[1]))
sys.exit(7)
"""
Kept = Callable[[float], tuple[subprocess.Popen[str], list[int], str]]
KEEPER = [sys.executable, "-I", "-S", keeper.__file__, sys.executable, "-c", SERVER]


def until(condition: Callable[[], bool], within_s: float = 15.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def gone(pids: list[int]) -> bool:
    return not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids)


@pytest.fixture
def kept() -> Kept:
    def start(seconds: float) -> tuple[subprocess.Popen[str], list[int], str]:
        command = [*KEEPER, str(seconds)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        *words, segment = process.stdout.readline().split()
        pids = [int(word) for word in words]
        assert os.path.exists(segment)
        assert not gone(pids)
        return process, pids, segment

    return start


def test_a_server_ends_with_its_pipe_and_takes_its_orphans_with_it(
    kept: Kept,
) -> None:
    process, pids, segment = kept(600)
    with process:
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(15) == 0
    assert gone(pids)
    assert not os.path.exists(segment)


def test_a_server_that_ends_by_itself_leaves_no_process_and_tells_its_code(
    kept: Kept,
) -> None:
    process, pids, segment = kept(0.2)
    with process:
        assert process.wait(15) == 7
    assert gone(pids)
    assert not os.path.exists(segment)


def test_a_killed_server_leaves_no_process(kept: Kept) -> None:
    process, pids, segment = kept(600)
    with process:
        (server,) = psutil.Process(process.pid).children()[:1]
        server.kill()
        assert process.wait(15) == 128 + signal.SIGKILL
    assert gone(pids)
    assert not os.path.exists(segment)


def test_nothing_outlives_an_agent_that_is_killed() -> None:
    program = f"import subprocess, sys, time; subprocess.Popen({[*KEEPER, '600']!r}, stdin=subprocess.PIPE); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as agent:
        assert agent.stdout is not None
        *words, segment = agent.stdout.readline().split()
        pids = [int(word) for word in words]
        below = [child.pid for child in psutil.Process(agent.pid).children(recursive=True)]
        agent.kill()
        until(lambda: gone([*pids, *below]))
        until(lambda: not os.path.exists(segment))


def test_only_what_nobody_uses_and_came_later_is_removed(tmp_path: Path) -> None:
    for name in ("before", "litter", "mapped", "open"):
        (tmp_path / name).write_bytes(b"\0" * 4096)
    with (tmp_path / "mapped").open("r+b") as file:
        mapped = mmap.mmap(file.fileno(), 4096)
    with (tmp_path / "open").open("rb"):
        assert remove_new(frozenset({"before"}), tmp_path) == ["litter"]
    mapped.close()
    assert present(tmp_path) == {"before", "mapped", "open"}
    assert remove_new(frozenset({"before"}), tmp_path) == ["mapped", "open"]


def test_vllm_finds_our_packages_and_none_of_those_beside_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RYZANSTEIN_MODEL", "x")
    environment = vllm_environment(tmp_path)
    assert [name for name in environment if name.startswith("RYZANSTEIN_")] == ["RYZANSTEIN_BOARD"]
    code = "import ryzanstein.worker.engines.vllm.inside as ours; print(ours.__file__)"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.startswith(str(tmp_path))
    names = [os.listdir(root) for root in environment["PYTHONPATH"].split(os.pathsep)]
    assert names == [["ryzanstein"]] * (len(names) - 1) + [["ryzanstein_llguidance"]]


def test_the_command_is_what_vllm_takes(tmp_path: Path) -> None:
    command = vllm_command(
        "/opt/vllm/python", "/models/a", tmp_path / "s", tp=2, max_sequences=9, arguments=["--dtype", "half"]
    )
    assert command[:4] == ("/opt/vllm/python", "-m", "vllm.entrypoints.openai.api_server", "--model=/models/a")
    assert {f"--uds={tmp_path / 's'}", "--tensor-parallel-size=2", "--max-num-seqs=9"} <= set(command)
    assert command[-2:] == ("--dtype", "half")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"engine": "vllm", "engine_args": "--port 80"}, "engine_args: --port is set by the node"),
        ({"engine": "vllm", "engine_args": "--served_model_name=x"}, "--served-model-name is set by the node"),
        ({"engine": "vllm", "engine_args": "'"}, "engine_args: No closing quotation"),
        ({"engine": "vllm", "quantization": "int8"}, "quantization is a setting of the node's own ranks"),
        ({"engine": "http://h:1", "tp": 2}, "tp is a setting of the node's own ranks"),
        ({"engine": "ftp://h:1"}, "engine: must be http"),
        ({"engine": "http://u:secret@h:1"}, "engine: must have no user or password"),
        ({"engine_key_file": "/dev/null"}, "engine_key_file is of a server"),
        ({"engine": "http://h:1", "engine_key_file": "/dev/null"}, "must have one key"),
        ({"engine": "http://h:1", "engine_key_file": "/missing"}, "No such file"),
        ({"engine": "http://h:1", "model": "/a", "more_models": "b=/b"}, "serves one model"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message) as refused:
        WorkerSettings(_env_file=None, **values)  # type: ignore[call-arg, arg-type]
    assert not any("secret" in error["msg"] for error in refused.value.errors())


def test_vllm_may_be_split_over_gpus() -> None:
    assert WorkerSettings(_env_file=None, engine="vllm", tp=2).starts_engine  # type: ignore[call-arg]
