"""The three lines of a page, with addresses and an environment of our own: a real model, served from its file."""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]
ROOT = Path(__file__).parents[5]
URL = "http://127.0.0.1:8000"
WITHIN_S = 300
PROGRAM, OURS = ".venv/bin/ryzanstein", str(Path(sys.executable).with_name("ryzanstein"))


def lines_of(page: str) -> list[str]:
    """The block that gets a model, serves it and asks it."""
    blocks = re.findall(r"^```bash\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
    (lines,) = [block.splitlines() for block in blocks if "models get" in block or "pip install" in block]
    return list(lines)


@contextmanager
def served(page: str, folder: Path) -> Iterator[Callable[[], dict[str, Any]]]:
    """Runs the first two lines of a page. What it yields runs the third, and returns the answer."""
    install, serve, ask = lines_of(page)
    environment = {**os.environ, "RYZANSTEIN_MODELS": str(folder / "models")}
    install = install.replace(".venv/bin/p", f"{ROOT}/build/judges/bin/p").replace(PROGRAM, OURS)
    subprocess.run(["bash", "-c", install], cwd=folder, env=environment, check=True, capture_output=True, timeout=WITHIN_S)
    program, *words = shlex.split(serve)
    assert program == PROGRAM
    ports = [part for port in ("--http-port", "--grpc-port", "--orchestrator-port") for part in (port, "0")]
    command = [
        OURS,
        *words,
        "--json",
        *ports,
        "--state-dir",
        str(folder / "state"),
    ]
    with (
        (folder / "log").open("w") as log,
        subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=log) as process,
    ):
        try:
            ask = ask.replace(URL, _addresses(process, folder / "log")["http"][0])
            yield lambda: dict(json.loads(_output(shlex.split(ask))))
        finally:
            process.terminate()
            process.wait(60)


def _addresses(process: subprocess.Popen[bytes], log: Path) -> dict[str, Any]:
    """Returns what `--json` prints when everything is ready. A process that ends closes its output."""
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line == b"}\n":
            return dict(json.loads(b"".join(lines)))
    pytest.fail(f"`ryzanstein up` ended: {log.read_text()}")


def _output(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=WITHIN_S, check=True).stdout


def test_a_chat_model_answers(tmp_path: Path) -> None:
    with served("README.md", tmp_path) as ask:
        answer = ask()
    assert "Paris" in answer["choices"][0]["message"]["content"]


def test_a_model_without_a_template_completes(tmp_path: Path) -> None:
    with served("docs/operate/quantize-and-convert.md", tmp_path) as ask:
        answer = ask()
    assert answer["choices"][0]["text"].startswith(" Thursday, Friday")
    assert 0 < answer["usage"]["completion_tokens"] <= 8
