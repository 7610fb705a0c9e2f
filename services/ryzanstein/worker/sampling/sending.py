"""Numbers on their way to a device."""

from __future__ import annotations

import torch
from torch import Tensor


def sent(values: list[int] | list[float], device: torch.device) -> Tensor:
    """Returns the values on a device: whole numbers in int64, others in float64. Nothing waits for what a GPU does.

    The copy is made from memory that the GPU reads by itself. A copy from any other waits for all work before it.
    """
    dtype = torch.float64 if values and isinstance(values[0], float) else torch.int64
    held = torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda")
    return held.to(device, non_blocking=True)
