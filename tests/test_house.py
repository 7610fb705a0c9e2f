"""The shape of the code: rooms that can be seen at a glance, and programs that load what they need."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LARGEST_ROOM = 10
LARGER_ROOMS = 5


def test_few_rooms_have_more_than_ten_modules() -> None:
    modules = [
        path for root in ("services", "shared", "lab", "clients/python") for path in (ROOT / root / "ryzanstein").rglob("*.py")
    ]
    counts = Counter(path.parent for path in modules if not path.stem.startswith("__") and "v1" not in path.parts)
    larger = {str(room.relative_to(ROOT)): count for room, count in counts.items() if count > LARGEST_ROOM}
    assert len(larger) <= LARGER_ROOMS, larger


@pytest.mark.parametrize(
    ("program", "foreign"),
    [
        ("ryzanstein.router.__main__", {"torch", "tokenizers", "cryptography"}),
        ("ryzanstein.orchestrator.__main__", {"torch", "numpy", "tokenizers", "fastapi", "cryptography"}),
        ("ryzanstein.worker.__main__", {"torch", "fastapi", "cryptography"}),
        ("ryzanstein.worker.text.templates.program", {"torch", "numpy", "grpc"}),
        ("ryzanstein.worker.text.grammars.program", {"torch", "grpc"}),
        ("ryzanstein.lab.simulation.simulation", {"torch"}),
        ("ryzanstein.cli.main", {"torch", "fastapi", "cryptography", "textual"}),
        ("ryzanstein.cli.watch.command", {"torch", "fastapi", "cryptography", "textual"}),
        ("ryzanstein.console.__main__", {"torch", "numpy", "tokenizers", "fastapi", "cryptography"}),
    ],
)
def test_a_program_loads_no_library_that_it_does_not_need(program: str, foreign: set[str]) -> None:
    code = f"import sys, {program}; print(*{foreign!r} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr


def test_no_class_name_has_two_meanings() -> None:
    named: dict[str, list[str]] = {}
    for root in ("services", "shared"):
        for path in (ROOT / root / "ryzanstein").rglob("*.py"):
            if "v1" not in path.parts:
                for node in ast.parse(path.read_text()).body:
                    if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                        named.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    assert {name: places for name, places in named.items() if len(places) > 1} == {}
