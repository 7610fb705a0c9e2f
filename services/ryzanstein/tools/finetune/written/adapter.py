"""The directory of an adapter, as peft writes it, with a report and a curve of its training."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file


def write_adapter(model: Any, directory: Path) -> None:
    """Writes adapter_config.json and adapter_model.safetensors of a model of peft. Raises OSError."""
    from peft import get_peft_model_state_dict

    config = model.peft_config["default"]
    before, config.inference_mode = config.inference_mode, True
    try:
        config.save_pretrained(str(directory))
    finally:
        config.inference_mode = before
    state = get_peft_model_state_dict(model, save_embedding_layers=False)
    tensors = {name: tensor.detach().contiguous() for name, tensor in state.items()}
    file = directory / "adapter_model.safetensors"
    save_file(tensors, file, {"format": "pt"})
    shutil.copymode(directory / "adapter_config.json", file)  # the library keeps its files private


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Writes an object for people to read. Raises OSError."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
