"""The models and chat templates that `ryzanstein up` is given, with the names under which they are served."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import typer

from ryzanstein.files.model_paths import is_gguf, model_name
from ryzanstein.files.models_home import model_path
from ryzanstein.files.named_paths import read_option, write_setting
from ryzanstein.generation.prompts import name_fault

_MODEL, _TEMPLATE = "--model", "--chat-template"


@dataclass(frozen=True, slots=True)
class NamedModel:
    """A model, by an absolute path."""

    name: str
    path: Path


def models_to_serve(options: Sequence[str]) -> list[NamedModel]:
    """Returns the models of the options DIR or NAME=DIR. Raises BadParameter, which says what is wrong."""
    models = [_model(option) for option in options]
    names = [model.name for model in models]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise typer.BadParameter(f"two models are named {twice!r}: name one as NAME=DIR", param_hint=_MODEL)
    return models


def template_setting(options: Sequence[str], models: Sequence[NamedModel]) -> str:
    """Returns the setting of a node for the options FILE or NAME=FILE. Raises BadParameter."""
    files = []
    for option in options:
        name, path = read_option(option)
        _require_text(str(path), _TEMPLATE)
        if not os.path.isfile(path):
            raise typer.BadParameter(f"{path} is not a file", param_hint=_TEMPLATE)
        files.append((name or models[0].name, path.absolute()))
    names = [name for name, _ in files]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise typer.BadParameter(f"there are two files for model {twice!r}", param_hint=_TEMPLATE)
    return write_setting(files)


def _model(option: str) -> NamedModel:
    name, given = read_option(option)
    _require_text(option, _MODEL)
    path = model_path(str(given))
    if not os.path.exists(path):  # unlike Path's, it raises nothing for a path that is too long
        raise typer.BadParameter(f"{path} does not exist, and no fetched model has this name", param_hint=_MODEL)
    if path.is_file() and not is_gguf(path):
        raise typer.BadParameter(f"{path} is neither a directory nor a GGUF file", param_hint=_MODEL)
    named = NamedModel(name or model_name(path), path.absolute())
    if fault := name_fault(named.name):
        raise typer.BadParameter(f"the name of {path} {fault}: name it as NAME=DIR", param_hint=_MODEL)
    return named


def _require_text(given: str, option: str) -> None:
    """Raises BadParameter for bytes that are no UTF-8: a command line may contain them, and no message can."""
    if any("\ud800" <= each <= "\udfff" for each in given):
        raise typer.BadParameter("must be UTF-8 text", param_hint=option)
