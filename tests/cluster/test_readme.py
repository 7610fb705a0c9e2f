"""Every example of the README and of docs/build/clients.md is run against a cluster, with its addresses in place of theirs."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ryzanstein.cli.processes.ports import free_ports

ROOT = Path(__file__).parents[2]
PAGES = "".join((ROOT / page).read_text() for page in ("README.md", "docs/build/clients.md"))
BLOCKS = re.findall(r"^```(sh|python)\n(.*?)^```", PAGES, re.MULTILINE | re.DOTALL)
COMMANDS = [line for kind, block in BLOCKS if kind == "sh" for line in block.splitlines()]
PROGRAMS = [block for kind, block in BLOCKS if kind == "python"]
BUF = ["npx", "--yes", "--package", "@bufbuild/buf@1.75.0", "buf", "curl", "--protocol", "grpc", "--http2-prior-knowledge"]


def as_buf_curl(grpcurl: list[str]) -> list[str]:
    """grpcurl cannot be installed everywhere; buf curl takes the same request through the same reflection."""
    arguments = [argument for argument in grpcurl[1:] if argument != "-plaintext"]
    data = ["-d", arguments.pop(arguments.index("-d") + 1)] if "-d" in arguments else []
    address, what = [argument for argument in arguments if argument != "-d"]
    if what == "list":
        return [*BUF, "--list-services", f"http://{address}"]
    return [*BUF, *data, f"http://{address}/{what}"]


def here(text: str, calm: Any) -> str:
    return text.replace("127.0.0.1:50051", calm.cluster.router_address).replace("http://127.0.0.1:8000", calm.cluster.http_url)


def as_command(line: str, calm: Any) -> list[str]:
    words = shlex.split(here(line, calm))
    if words[0] == "grpcurl":
        return as_buf_curl(words)
    if words[0] == ".venv/bin/ryzanstein":
        where = {"chat": ["--router", calm.cluster.router_address]}.get(
            words[1], ["--orchestrator", calm.cluster.orchestrator_address, "--router", calm.cluster.router_address]
        )
        return [str(Path(sys.executable).with_name("ryzanstein")), words[1], *where, *words[2:]]
    return words


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_of_the_readme_works(calm: Any, line: str) -> None:
    done = subprocess.run(as_command(line, calm), capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    if "chat --session" in line and "What is my name" in line:
        assert "Tavik" in done.stdout
    if "Count from 1 to 20" in line:
        assert re.search(r"18\D+19\D+20", done.stdout)


@pytest.mark.long
def test_the_three_lines_from_no_key_to_a_keyed_answer_work(tmp_path: Path) -> None:
    up, export, chat = re.search(r"## With keys\n\n```bash\n(.*?)```", PAGES, re.DOTALL)[1].splitlines()  # type: ignore[index]
    program = Path(sys.executable).with_name("ryzanstein")
    http, grpc, orchestrator = map(str, free_ports(3))
    ports = ("--http-port", http, "--grpc-port", grpc, "--orchestrator-port", orchestrator)
    command = [str(program), *shlex.split(up)[1:], *ports, "--json", "--nodes", "1", "--tp", "1"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as cluster:
        try:
            assert cluster.stdout is not None
            while "api_key_file" not in (line := cluster.stdout.readline()):
                assert line, "the cluster did not start"
            asked = chat.replace(".venv/bin/ryzanstein chat", f"{program} chat --router 127.0.0.1:{grpc}")
            script = f"{export}\n{asked}\nunset RYZANSTEIN_API_KEY\n{asked}"
            done = subprocess.run(
                ["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False
            )
            assert done.returncode == 1
            assert done.stdout.strip()
            assert "KEY_MISSING" in done.stderr
        finally:
            cluster.terminate()


@pytest.mark.parametrize("program", PROGRAMS, ids=["openai", "stubs"])
def test_a_program_of_the_readme_works(calm: Any, program: str) -> None:
    done = subprocess.run([sys.executable, "-c", here(program, calm)], capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    assert re.search(r"18\D+19\D+20", done.stdout)


def test_the_readme_has_examples_of_each_kind() -> None:
    assert {"grpcurl", "curl", ".venv/bin/ryzanstein"} <= {shlex.split(line)[0] for line in COMMANDS}
    assert len(PROGRAMS) == 2
