"""Distinguishes lack of memory from other failures of a step.

torch, numpy, Python and our kernels report it in different ways.
"""

from __future__ import annotations

import torch

# Messages of plain RuntimeErrors: of torch's CPU allocator, and of a C++ exception that torch
# passes on.
_WORDS = ("can't allocate memory", "bad_alloc")


def is_shortage(error: BaseException) -> bool:
    """Returns whether memory was short: the same step might succeed if smaller, or later."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _WORDS)


def give_back(device: torch.device) -> None:
    """Releases memory that torch caches for sizes it has seen, so that other sizes can use it."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
