"""Memory for weights, and how much of it a model may use on this machine."""

from __future__ import annotations

import math
import mmap
from collections import deque
from weakref import finalize

import torch
from torch import Tensor

from ryzanstein.process.allotment import available_memory_bytes

_MAPPED_BYTES = 2**20
_MAX_SPARE = 4  # as many shapes as a layer's large weights have


class WeightMemory:
    """An allocator of zeros of one dtype for weights, used while a model is loaded.

    On a CPU large weights are mapped from the operating system: they take no time and no memory
    until they are written, while torch would write them first. Memory that is no longer referenced
    (the floats of a weight that has been packed) is reused for the next weight of that size:
    rewriting it costs half as much as its first touch. It is returned to the system at `close`.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype, self._device = dtype, device
        self._spare: deque[mmap.mmap] = deque(maxlen=_MAX_SPARE)

    def zeros(self, *shape: int) -> Tensor:
        num_bytes = math.prod(shape) * self._dtype.itemsize
        if self._device.type != "cpu" or num_bytes < _MAPPED_BYTES:
            return torch.zeros(shape, dtype=self._dtype, device=self._device)
        for memory in self._spare:
            if len(memory) == num_bytes:
                self._spare.remove(memory)
                return self._tensor(memory, shape).zero_()
        return self._tensor(mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), shape)

    def close(self) -> None:
        """Releases the spare memory. From then on unused memory returns to the system at once."""
        self._spare = deque(maxlen=0)

    def _tensor(self, memory: mmap.mmap, shape: tuple[int, ...]) -> Tensor:
        view = memoryview(memory)  # lives as long as any tensor on it
        finalize(view, self._give_back, memory).atexit = False
        return torch.frombuffer(view, dtype=self._dtype).view(shape)

    def _give_back(self, memory: mmap.mmap) -> None:
        self._spare.append(memory)


def available_bytes(device: torch.device) -> int:
    """Returns the bytes that can be allocated on `device` without swapping.

    On a CPU the result respects the limits of the container and of the groups above it.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    return available_memory_bytes()
