"""Programs are started so that the current folder is no place to import from: it may be a model somebody else wrote."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ryzanstein.demo import MODEL_DIR

ROOT = Path(__file__).parents[1]
COMMAND = (sys.executable, "-P", "-c", "from ryzanstein.cli.__main__ import main; main()")
HOSTILE = """from pathlib import Path
(Path(__file__).parent / ("imported." + __name__)).touch()
raise SystemExit("imported from the current folder")
"""
NAMES = ("uvloop", "jinja2", "grpc", "torch", "random", "typer", "pydantic", "fastapi", "numpy", "ryzanstein", "tokenizers")


def test_no_program_is_started_with_the_current_folder_on_its_path() -> None:
    """`-P` leaves it out, and so do `-I` and a program that is given as a file or as text."""
    unsafe = r'sys\.executable, (?!"-P"|"-I"|__file__|\[)|(?<!"-P"), "-m"|python3? -m (?:ryzanstein|runners)'
    folders = [ROOT / folder for folder in ("services", "shared", "lab", "clients", "docs", "k8s")]
    files = [path for folder in folders for path in folder.rglob("*") if path.suffix in {".py", ".md", ".yaml", ".Dockerfile"}]
    assert len(files) > 500
    assert [str(path.relative_to(ROOT)) for path in files if re.search(unsafe, path.read_text())] == []


@pytest.fixture
def hostile_model(tmp_path: Path) -> Path:
    """A model that works, in a folder with modules of the names that services import."""
    folder = tmp_path / "model"
    folder.mkdir()
    for file in MODEL_DIR.iterdir():
        if file.suffix in {".json", ".safetensors"}:
            (folder / file.name).symlink_to(file)
    for name in NAMES:
        (folder / f"{name}.py").write_text(HOSTILE)
    return folder


@pytest.mark.cluster
def test_nothing_of_the_model_in_the_current_folder_is_imported(hostile_model: Path, tmp_path: Path) -> None:
    ports = [part for option in ("--http-port", "--grpc-port", "--orchestrator-port") for part in (option, "0")]
    flags = ["--model", ".", "--nodes", "1", "--tp", "1", "--json", "--state-dir", str(tmp_path / "state"), *ports]
    log = tmp_path / "log"
    with (
        log.open("w") as err,
        subprocess.Popen([*COMMAND, "up", *flags], cwd=hostile_model, stdout=subprocess.PIPE, stderr=err, text=True) as up,
    ):
        assert up.stdout is not None
        try:
            lines = iter(up.stdout.readline, "")
            document = "".join(iter(lambda: next(lines, "}\n"), "}\n")) + "}"
            assert json.loads(document)["nodes"], log.read_text()
        finally:
            up.send_signal(signal.SIGINT)
            up.wait(30)
    assert [path.name for path in hostile_model.glob("imported.*")] == []


@pytest.mark.parametrize("program", ["router", "convert"])
def test_a_subcommand_that_becomes_a_program_leaves_it_out_too(hostile_model: Path, program: str) -> None:
    environment = {**os.environ, "PYTHONSAFEPATH": ""}
    done = subprocess.run(
        [*COMMAND, program, "--help"], cwd=hostile_model, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert [path.name for path in hostile_model.glob("imported.*")] == []
