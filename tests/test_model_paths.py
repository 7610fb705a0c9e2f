"""Names and places of models as hubs and their caches lay them out."""

from __future__ import annotations

from pathlib import Path

import pytest

from ryzanstein.files.model_paths import is_gguf, model_location, model_name

COMMIT = "0123456789abcdef0123456789abcdef01234567"
DIGEST = "a" * 64


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A repository `org/tiny-chat` with two snapshots, as huggingface_hub lays it out."""
    repository = tmp_path / "models--org--tiny-chat"
    for commit in (COMMIT, "f" * 40):
        (repository / "snapshots" / commit).mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text(COMMIT)
    (repository / "blobs").mkdir()
    (repository / "blobs" / DIGEST).write_bytes(b"GGUF\3\0\0\0")
    (repository / "snapshots" / COMMIT / "tiny-q4.gguf").symlink_to(f"../../blobs/{DIGEST}")
    return repository


def test_a_repository_is_served_under_its_name_from_the_snapshot_of_main(cache: Path) -> None:
    assert model_name(cache) == "tiny-chat"
    assert model_location(cache) == cache / "snapshots" / COMMIT


def test_a_snapshot_has_the_name_of_its_repository(cache: Path) -> None:
    assert model_name(cache / "snapshots" / COMMIT) == "tiny-chat"
    assert model_location(cache / "snapshots" / COMMIT) == cache / "snapshots" / COMMIT


def test_without_a_main_the_only_snapshot_is_it(cache: Path) -> None:
    (cache / "refs/main").unlink()
    assert model_location(cache) == cache, "there are two"
    (cache / "snapshots" / ("f" * 40)).rmdir()
    assert model_location(cache) == cache / "snapshots" / COMMIT


def test_a_link_to_a_blob_is_a_gguf_file_and_keeps_its_name(cache: Path) -> None:
    link = cache / "snapshots" / COMMIT / "tiny-q4.gguf"
    assert is_gguf(link)
    assert model_name(link) == "tiny-q4"
    assert model_location(link) == cache / "blobs" / DIGEST
    assert is_gguf(model_location(link)), "by its first bytes"


def test_what_is_no_model_is_no_gguf_file(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("GGU")
    assert not is_gguf(tmp_path / "text")
    assert not is_gguf(tmp_path)
    assert not is_gguf(tmp_path / "missing")
    assert is_gguf(tmp_path / "missing.gguf"), "its name says what it is to be"


def test_other_directories_have_their_own_name(tmp_path: Path) -> None:
    (tmp_path / "models--not-a-repository").mkdir()
    assert model_name(tmp_path / "models--not-a-repository") == "models--not-a-repository"
    (tmp_path / "link").symlink_to(tmp_path / "models--not-a-repository")
    assert model_name(tmp_path / "link") == "link"
    assert model_name(Path("/")) == ""


def test_a_loop_of_links_and_a_name_that_is_too_long_are_no_model_and_no_failure(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    for path in (tmp_path / "a", tmp_path / "a/x", tmp_path / ("x" * 300)):
        assert not is_gguf(path)
        assert model_name(path) == path.name
        assert model_location(path).name
