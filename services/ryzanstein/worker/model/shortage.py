"""Tells want of memory from every other failure of a step, whoever reports it: torch, numpy, Python or our kernels."""

from __future__ import annotations

import torch

# What torch's allocator for CPUs says in a plain RuntimeError, and a C++ exception that it passes on as one.
_WORDS = ("can't allocate memory", "bad_alloc")


def is_shortage(error: BaseException) -> bool:
    """Whether the same step might go with less to compute, or later."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _WORDS)


def give_back(device: torch.device) -> None:
    """Lets other sizes have what torch keeps for the sizes that it has seen."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
