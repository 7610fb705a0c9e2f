"""A base with an adapter in its weights, as a checkpoint of floats."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import torch

from ryzanstein.tools.atomic import new_directory
from ryzanstein.tools.description import describe
from ryzanstein.tools.finetune.base.model import build
from ryzanstein.tools.finetune.base.opening import Base
from ryzanstein.worker.json_files import UnreadableFile, read_object
from ryzanstein.worker.refusal import CheckpointError, ModelRefused, excerpt

_SHARD = "4GB"


def merge(path: Path, adapter: Path, target: Path, dtype: torch.dtype, *, force: bool = False) -> None:
    """Writes the base `path` with an adapter of peft merged into it, complete or not at all. Raises ModelRefused; OSError."""
    with Base.open(path) as base, new_directory(target, force=force) as directory:
        model = with_trained(base, adapter)
        merged = model.merge_and_unload(safe_merge=True)
        written = merged.to(dtype)
        written.save_pretrained(str(directory), max_shard_size=_SHARD)
        (directory / "generation_config.json").unlink(missing_ok=True)
        config = {**base.config, "architectures": [type(written).__name__], "dtype": str(dtype).removeprefix("torch.")}
        config.pop("torch_dtype", None)
        (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        describe(base.path, directory)
        _refuse_unreadable(directory)


def with_trained(base: Base, adapter: Path) -> Any:
    """Returns the model of peft, of floats, with an adapter. Raises ModelRefused if a part of either has no counterpart."""
    from peft import PeftConfig, get_peft_model
    from peft.utils import load_peft_weights, set_peft_model_state_dict

    _refuse_none(adapter)
    model = build(base, floats=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            config = PeftConfig.from_pretrained(str(adapter))
            config.inference_mode = True
            adapted: Any = get_peft_model(model, config)
            state = load_peft_weights(str(adapter), device="cpu")
            found: Any = set_peft_model_state_dict(adapted, state)
        except (ValueError, TypeError, KeyError, RuntimeError) as error:
            raise ModelRefused(f"{adapter}: does not fit {base.path}: {error}") from error
    unknown = sorted(found.unexpected_keys)
    lacking = sorted(name for name in found.missing_keys if "lora_" in name or "modules_to_save" in name)
    for names, what in ((unknown, "has tensors that the model has no place for"), (lacking, "lacks tensors")):
        if names:
            raise ModelRefused(f"{adapter}: {what}: {excerpt(names)}")
    return adapted


def _refuse_none(adapter: Path) -> None:
    """Raises CheckpointError unless there is an adapter of peft."""
    try:
        read_object(adapter / "adapter_config.json")
    except UnreadableFile as error:
        raise CheckpointError(f"{adapter / 'adapter_config.json'}: {error}") from error
    if not (adapter / "adapter_model.safetensors").is_file():
        raise CheckpointError(f"{adapter / 'adapter_model.safetensors'}: No such file or directory")


def _refuse_unreadable(directory: Path) -> None:
    """Raises ModelRefused if a node could not read what was written."""
    with Base.open(directory):
        pass
