"""Which models `ryzanstein up` serves under which names, whatever their paths look like."""

from __future__ import annotations

import json
from pathlib import Path

import grpc
import pytest
import typer

from ryzanstein.cli.processes.cluster import ClusterSpec, LocalCluster
from ryzanstein.cli.up.models_to_serve import NamedModel, models_to_serve, template_setting
from ryzanstein.demo import MODEL_DIR
from ryzanstein.v1 import inference_pb2, inference_pb2_grpc


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_model_is_named_by_its_path_or_by_the_option(folder: Path) -> None:
    for name in ("a", "x,y", "with space"):
        (folder / name).mkdir()
    (folder / "link").symlink_to("a")
    options = ["a/", "other=a", "x,y", "with space", "link"]
    assert models_to_serve(options) == [
        NamedModel("a", folder / "a"),
        NamedModel("other", folder / "a"),
        NamedModel("x,y", folder / "x,y"),
        NamedModel("with space", folder / "with space"),
        NamedModel("link", folder / "link"),
    ]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["a", "b/../a"], "two models are named 'a': name one as NAME=DIR"),
        (["missing"], "missing does not exist"),
        (["name=missing"], "missing does not exist"),
        (["notes.txt"], "neither a directory nor a GGUF file"),
        (["n" * 129], "must have 1 to 128 characters, got 129: name it as NAME=DIR"),
        (["new\nline"], "cannot be printed: name it as NAME=DIR"),
        (["\udcff"], "must be UTF-8"),
        (["x" * 5000], "does not exist"),
        (["x=" + "x" * 5000 + ".gguf"], "does not exist"),
    ],
)
def test_what_cannot_be_served_is_said_in_a_sentence(folder: Path, options: list[str], text: str) -> None:
    for name in ("a", "b", "n" * 129, "new\nline"):
        (folder / name).mkdir()
    (folder / "notes.txt").touch()
    with pytest.raises(typer.BadParameter) as refused:
        models_to_serve(options)
    assert text in refused.value.message


def test_templates_go_to_the_first_model_or_to_the_named_one(folder: Path) -> None:
    models = [NamedModel("first", folder), NamedModel("a/b", folder)]
    for name in ("one,1.jinja", "two=2.jinja"):
        (folder / name).touch()
    setting = template_setting(["one,1.jinja", "a/b=two=2.jinja"], models)
    assert json.loads(setting) == {"first": str(folder / "one,1.jinja"), "a/b": str(folder / "two=2.jinja")}
    assert template_setting([], models) == ""
    for wrong, text in ((["x=missing"], "missing is not a file"), (["one,1.jinja", "first=one,1.jinja"], "two files for")):
        with pytest.raises(typer.BadParameter, match=text):
            template_setting(wrong, models)


@pytest.mark.cluster
def test_models_with_odd_paths_are_served_under_their_names(tmp_path: Path) -> None:
    odd = tmp_path / "a,b = ü\n{"
    odd.symlink_to(MODEL_DIR)
    (tmp_path / "link").symlink_to(MODEL_DIR)
    models = models_to_serve([str(tmp_path / "link"), f"org/odd, 2=1={odd}"])
    flags = ("--chat-template", template_setting([], models))
    paths, names = [model.path for model in models], tuple(model.name for model in models)
    spec = ClusterSpec(paths[0], 1, tp=1, more_models=(paths[1],), model_names=names, worker_flags=flags)
    with LocalCluster(spec) as cluster, grpc.insecure_channel(cluster.router_address) as channel:
        listed = inference_pb2_grpc.InferenceServiceStub(channel).ListModels(inference_pb2.ListModelsRequest(), timeout=5)
        assert sorted(model.name for model in listed.models) == ["link", "org/odd, 2=1"]
