"""Random adapters that peft makes of random checkpoints, and peft's own answers with them."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tests.worker.model.architectures.checkpoints import write

from ryzanstein.worker.adapters.packing import pack
from ryzanstein.worker.adapters.reading import read_adapter

NOT_ADAPTED = ("kv_b_proj", "wpe", "embed_positions", "position_embeddings")
"""Linears and embeddings of transformers' models that take no adapter here."""


EXPERT_NAMES = {"gate", "gate_proj", "up_proj", "down_proj"}
"""Of what has them in a mixture, peft makes adapters of its experts, whatever else has such a name."""


@dataclass
class Judge:
    """A checkpoint, and transformers' model of it with adapters of peft, which are written to `folder`."""

    base: Path
    folder: Path
    model: Any
    packed: dict[str, Path] = field(default_factory=dict)

    @classmethod
    def of(cls, name: str, seed: int, folder: Path) -> Judge:
        """Of a case of `architectures/checkpoints.py`."""
        return cls(folder / "base", folder, write(name, seed, folder / "base"))

    def targets(self, *, ends: bool) -> list[str]:
        """All modules that may be adapted, by their whole names. `ends`: embeddings and head too."""
        from transformers.pytorch_utils import Conv1D

        kinds = (torch.nn.Linear, Conv1D, torch.nn.Embedding) if ends else (torch.nn.Linear, Conv1D)
        model = self.model.get_base_model() if hasattr(self.model, "peft_config") else self.model
        found = [name for name, module in model.named_modules() if isinstance(module, kinds)]
        left = {*NOT_ADAPTED, *(() if ends else ("lm_head", "embed_out"))}
        if any(".experts." in name for name, _ in model.named_parameters()):
            left |= EXPERT_NAMES
        if model.config.model_type in ("falcon_h1", "nemotron_h"):
            left.add("out_proj")  # peft refuses it
        return [name for name in found if name.rpartition(".")[2] not in left]

    def adapt(self, name: str, seed: int = 0, **config: Any) -> Path:
        """Adds an adapter with random factors. Returns the directory that peft saves it in."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from peft import LoraConfig, get_peft_model

            torch.manual_seed(seed)
            chosen = LoraConfig(**{"init_lora_weights": False, **config})
            if hasattr(self.model, "peft_config"):
                self.model.add_adapter(name, chosen)
            else:
                self.model = get_peft_model(self.model, chosen, name)
        return self.save(name)

    def save(self, name: str) -> Path:
        """Returns the directory in which peft saves an adapter."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.model.save_pretrained(self.folder / "adapters", selected_adapters=[name])
        return self.folder / "adapters" / name

    def read(self, name: str, directory: Path) -> None:
        """Reads an adapter back. Of patterns the first one counts, and they are saved in the order of the alphabet."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from peft import PeftModel

            self.model = PeftModel.from_pretrained(self.model, directory, name)

    def pack(self, name: str, adaptable: Mapping[str, tuple[int, int]]) -> Path:
        """Reads and packs an adapter, for a model with these weights."""
        self.packed[name] = self.folder / f"{name}.packed"
        pack(read_adapter(self.folder / "adapters" / name, adaptable, self.base), self.packed[name])
        return self.packed[name]

    @torch.inference_mode()
    def logits(self, ids: Sequence[int], adapter: str | None) -> torch.Tensor:
        """peft's logits of every position, [T, V]."""
        if adapter is None and hasattr(self.model, "peft_config"):
            with self.model.disable_adapter():
                return self.logits_now(ids)
        if adapter is not None:
            self.model.set_adapter(adapter)
            self.model.eval()
        return self.logits_now(ids)

    def logits_now(self, ids: Sequence[int]) -> torch.Tensor:
        found: torch.Tensor = self.model(torch.tensor([list(ids)])).logits[0].float()
        return found


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The greatest difference over the greatest number."""
    return ((found - expected).abs().max() / expected.abs().max()).item()
