"""The page's scripts, read by a checker of types: `bash .ci/parts browser` installs it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

import ryzanstein.console

pytestmark = [pytest.mark.lab, pytest.mark.timeout(120)]

ROOT = Path(__file__).parents[3]
CHECKER = ROOT / "build/browser/node_modules/.bin/tsc"
STATIC = Path(next(iter(ryzanstein.console.__path__))) / "static"
CHECKS = ("--noEmit", "--allowJs", "--checkJs", "--strict", "--noUnusedLocals", "--noImplicitReturns")
LANGUAGE = ["--target", "es2023", "--module", "esnext", "--moduleResolution", "bundler", "--lib", "es2023,dom,dom.iterable"]


def checked(folder: Path) -> str:
    """What the checker says of all scripts in a folder."""
    assert CHECKER.exists(), "the checker is needed: bash .ci/parts browser"
    files = sorted(map(str, folder.glob("*.js")))
    return subprocess.run(
        [CHECKER, *CHECKS, *LANGUAGE, *files], capture_output=True, text=True, timeout=100, check=False
    ).stdout


def test_the_scripts_have_no_errors_of_types() -> None:
    assert checked(STATIC) == ""


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("this.timer = 0;", 'this.timer = "later";'),
        ('t: "ping"', "t: this.nothing"),
        ("    clearTimeout(this.timer);\n", "    const unused = 1;\n"),
    ],
)
def test_the_checker_finds_what_is_wrong(tmp_path: Path, right: str, wrong: str) -> None:
    shutil.copytree(STATIC, tmp_path / "static")
    socket = tmp_path / "static/socket.js"
    assert right in socket.read_text()
    socket.write_text(socket.read_text().replace(right, wrong))
    assert "socket.js" in checked(tmp_path / "static")
