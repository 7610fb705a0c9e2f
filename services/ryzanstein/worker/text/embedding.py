"""Reads how a model makes vectors of texts, from the files that sentence-transformers writes.

`modules.json` lists the parts: the model itself, a pooling, perhaps a normalization. What would
change a vector and is not served is refused by name.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ryzanstein import errors
from ryzanstein.errors import RyzansteinError
from ryzanstein.worker.engine.messages import Pooling
from ryzanstein.worker.json_files import UnreadableFile, parse_object, parse_value, read_bytes
from ryzanstein.worker.refusal import bounded, excerpt

MODULES = "modules.json"
_POOLINGS: Mapping[str, Pooling] = {"mean": "mean", "lasttoken": "last"}
_FLAG = "pooling_mode_{}"
_FLAGS = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")
_MAX_PROMPTS = 64


@dataclass(frozen=True, slots=True)
class EmbeddingModel:
    """How vectors are made: `pooling`, then cut to some of their first numbers, then `normalized`.

    `max_tokens` of one input; None: as the model's context allows. `lower`: texts are put in lower
    case. `prompts` stand before texts; `default_prompt` is the name of one, or empty. `cuts` are the
    numbers of dimensions to which a vector may be cut; `cuttable`: to any number.
    """

    pooling: Pooling
    normalized: bool = False
    max_tokens: int | None = None
    lower: bool = False
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str = ""
    cuts: tuple[int, ...] = ()
    cuttable: bool = False

    @classmethod
    def read(cls, directory: Path, config: Mapping[str, Any]) -> EmbeddingModel | None:
        """Returns what the directory says; None: it has no modules.json, so the model generates text.

        `config` is its config.json. Raises FAILED_PRECONDITION with reason MODEL_INVALID, naming the
        file and what of it is not supported.
        """
        path = directory / MODULES
        if not os.path.lexists(path):
            return None
        modules = _modules(path)
        transformer = _object(directory / "sentence_bert_config.json")
        settings = _object(directory / "config_sentence_transformers.json")
        pooling = _pooling(directory / modules["Pooling"] / "config.json")
        cuts = config.get("matryoshka_dimensions", settings.get("matryoshka_dimensions")) or []
        prompts, default = _prompts(settings, directory / "config_sentence_transformers.json")
        return cls(
            pooling=pooling,
            normalized="Normalize" in modules,
            max_tokens=_max_tokens(transformer, directory / "sentence_bert_config.json"),
            lower=transformer.get("do_lower_case") is True,
            prompts=prompts,
            default_prompt=default,
            cuts=tuple(sorted({cut for cut in cuts if isinstance(cut, int) and cut > 0})) if isinstance(cuts, list) else (),
            cuttable=config.get("is_matryoshka", settings.get("is_matryoshka")) is True,
        )

    def prompt(self, name: str) -> str:
        """Returns the text that stands before each text. Raises INVALID_ARGUMENT for an unknown name."""
        name = name or self.default_prompt
        if name and name not in self.prompts:
            known = ", ".join(sorted(self.prompts)) or "none"
            raise errors.invalid("prompt_name", f"must be one of the model's prompts: {known}"[:256], name[:64])
        return self.prompts[name] if name else ""

    def check_cut(self, dimensions: int) -> None:
        """Raises INVALID_ARGUMENT if vectors may not be cut to so many numbers."""
        if not self.cuttable and not self.cuts:
            raise errors.invalid("dimensions", "is not supported: the model does not say that its vectors may be cut")
        if self.cuts and not self.cuttable and dimensions not in self.cuts:
            raise errors.invalid("dimensions", f"must be one of {', '.join(map(str, self.cuts))}"[:256], dimensions)


def _modules(path: Path) -> dict[str, str]:
    """Returns the folder of each module by the last part of its type."""
    found = _read(path, parse_value)
    if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
        raise _invalid(path, "must be a list of objects")
    names = [str(each.get("type", "")).rsplit(".", 1)[-1] for each in found]
    if names not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise _invalid(path, f"only Transformer, Pooling and Normalize are supported, in this order, not {excerpt(names)}")
    folders = {name: str(each.get("path", "")) for name, each in zip(names, found, strict=True)}
    if folders["Transformer"]:
        raise _invalid(path, f"the Transformer must be in the model's own folder, not in {excerpt(folders['Transformer'])}")
    if Path(folders["Pooling"]).is_absolute() or ".." in Path(folders["Pooling"]).parts:
        raise _invalid(path, f"path {excerpt(folders['Pooling'])} leaves the model's folder")
    return folders


def _pooling(path: Path) -> Pooling:
    config = _object(path, required=True)
    if "pooling_mode" in config:
        modes = config["pooling_mode"] if isinstance(config["pooling_mode"], list) else [config["pooling_mode"]]
    else:
        flags = [flag for flag in _FLAGS if config.get(_FLAG.format(flag), flag == "mean_tokens") is True]
        modes = [flag.removesuffix("_tokens") for flag in flags]
    if len(modes) != 1 or modes[0] not in _POOLINGS:
        what = "of a causal model, only the mean of all tokens or the last one"
        raise _invalid(path, f"pooling {excerpt(modes)} is not supported: {what}")
    if config.get("include_prompt", True) is not True:
        raise _invalid(path, "include_prompt false is not supported")
    return _POOLINGS[modes[0]]


def _max_tokens(transformer: Mapping[str, Any], path: Path) -> int | None:
    most = transformer.get("max_seq_length")
    if most is not None and (not isinstance(most, int) or isinstance(most, bool) or most < 1):
        raise _invalid(path, f"max_seq_length must be a positive integer or null, got {excerpt(most)}")
    return most


def _prompts(settings: Mapping[str, Any], path: Path) -> tuple[Mapping[str, str], str]:
    prompts, default = settings.get("prompts") or {}, settings.get("default_prompt_name") or ""
    if not isinstance(prompts, dict) or len(prompts) > _MAX_PROMPTS or not all(isinstance(v, str) for v in prompts.values()):
        raise _invalid(path, f"prompts must be an object of at most {_MAX_PROMPTS} strings")
    if not isinstance(default, str) or (default and default not in prompts):
        raise _invalid(path, f"default_prompt_name {excerpt(default)} is not one of the prompts")
    return prompts, default


def _object(path: Path, *, required: bool = False) -> Mapping[str, Any]:
    if not required and not os.path.lexists(path):
        return {}
    found: Mapping[str, Any] = _read(path, parse_object)
    return found


def _read(path: Path, parse: Any) -> Any:
    try:
        return parse(read_bytes(path).decode("utf-8"))
    except (UnreadableFile, UnicodeDecodeError) as error:
        raise _invalid(path, str(error)) from error


def _invalid(path: Path, what: str) -> RyzansteinError:
    return errors.failed_precondition("MODEL_INVALID", bounded(f"{path}: {what}"))
