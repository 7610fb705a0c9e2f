"""How a rank runs its model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from ryzanstein.worker.settings.rank_settings import DTYPE_NAMES, ModelSettings

DTYPES: Mapping[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPE_NAMES}


def _nothing(_read_bytes: int, _of_bytes: int) -> None:
    pass


@dataclass(frozen=True, slots=True)
class RunnerOptions(ModelSettings):
    """The options of a rank's model: its settings, and what only this rank or process knows."""

    device: str = "cpu"
    """torch's name of it."""
    num_threads: int | None = None
    """None keeps torch's own choice."""
    compiles_kernels: bool = True
    """Kernels may be compiled now, which takes up to a minute; ranks use what their agent has had compiled."""
    on_read: Callable[[int, int], None] = _nothing
    """Called after each tensor that was read, with the bytes read so far and those to be read in all."""
    on_pack: Callable[[int, int], None] = _nothing
    """Called before and after each weight is packed, with the bytes packed so far and those that were to be packed so far."""

    @property
    def without_lending(self) -> str:
        """Says why blocks can neither be borrowed nor lent; empty if they can."""
        if not self.lends_blocks:
            return "it is not enabled"
        if self.torch_device.type != "cpu":
            return f"a cache on {self.torch_device.type} is one allocation, whose parts cannot be returned"
        return ""

    @property
    def torch_device(self) -> torch.device:
        return torch.device(self.device)

    @property
    def torch_dtype(self) -> torch.dtype:
        if self.dtype == "auto":
            return torch.bfloat16 if self.torch_device.type == "cuda" else torch.float32
        return DTYPES[self.dtype]

    @property
    def kv_torch_dtype(self) -> torch.dtype:
        """The dtype of the cache's keys and values."""
        return self.torch_dtype if self.kv_dtype == "auto" else DTYPES[self.kv_dtype]
