"""The GPUs of this machine that processes may use, and whether ranks get them; without torch.

They are asked through NVIDIA's management library, which comes with the driver
(https://docs.nvidia.com/deploy/nvml-api).
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from ryzanstein import errors

Device = Literal["auto", "cpu", "cuda"]

VISIBLE = "CUDA_VISIBLE_DEVICES"
_NVML = "libnvidia-ml.so.1"
_BUILD = re.compile(r"^cuda\b[^=\n]*=\s*(['\"].+['\"])", re.MULTILINE)  # of torch/version.py: None on a CPU build


class _DeviceMemory(ctypes.Structure):
    """nvmlMemory_t."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


@dataclass(frozen=True, slots=True)
class Gpus:
    """The visible GPUs by the names that CUDA_VISIBLE_DEVICES has for them, and that variable; None: not set.

    `has_build`: torch here was built with CUDA.
    """

    names: tuple[str, ...] = ()
    variable: str | None = None
    has_build: bool = True

    def __str__(self) -> str:
        visible = f"{len(self.names)} {'is' if len(self.names) == 1 else 'are'} visible"
        return visible if self.variable is None else f"{visible} ({VISIBLE}={self.variable})"


@dataclass(frozen=True, slots=True)
class DeviceChoice:
    """Where ranks compute, `cpu` or `cuda`, and why, for people."""

    device: Literal["cpu", "cuda"]
    reason: str


def choose_device(asked: Device, num_ranks: int, whose: str, gpus: Gpus) -> DeviceChoice:
    """Chooses where ranks compute, each of which needs a GPU of its own. `whose` names them, such as `tp 2`.

    Raises FAILED_PRECONDITION if GPUs are asked for and there are too few, or torch cannot use them.
    """
    lacks = _lacks(num_ranks, whose, gpus)
    if asked == "cuda" and lacks:
        raise errors.failed_precondition("NO_GPU", f"{lacks}; choose device cpu, or fewer ranks")
    if asked == "cpu":
        return DeviceChoice("cpu", "as it was set")
    return DeviceChoice("cpu" if lacks else "cuda", lacks or str(gpus))


def _lacks(num_ranks: int, whose: str, gpus: Gpus) -> str:
    if not gpus.names:
        return f"{whose} needs {_count(num_ranks)}, {gpus}"
    if not gpus.has_build:
        return f"{gpus}, and torch was built without CUDA"
    return f"{whose} needs {_count(num_ranks)}, {gpus}" if len(gpus.names) < num_ranks else ""


def _count(number: int) -> str:
    return f"{number} GPU{'' if number == 1 else 's'}"


def find_gpus() -> Gpus:
    """Returns the GPUs that this process may use; none without a driver."""
    with _nvml() as nvml:
        names = () if nvml is None else tuple(name for name, _ in _handles(nvml))
    return Gpus(names, os.environ.get(VISIBLE), torch_has_cuda())


def memory_bytes(num_ranks: int) -> int:
    """Returns the memory of the GPUs of so many ranks, one each; 0 when the driver does not tell."""
    with _nvml() as nvml:
        return 0 if nvml is None else sum(_total(nvml, handle) for _, handle in _handles(nvml)[:num_ranks])


def torch_has_cuda() -> bool:
    """Returns whether the installed torch was built with CUDA. It is not imported, which takes a second."""
    torch = find_spec("torch")
    if torch is None or torch.origin is None:
        return False
    try:
        return _BUILD.search((Path(torch.origin).parent / "version.py").read_text()) is not None
    except OSError:
        return False


@contextmanager
def _nvml() -> Iterator[ctypes.CDLL | None]:
    """Opens the library for a moment; None if there is none or it does not work."""
    try:
        nvml = ctypes.CDLL(_NVML)
    except OSError:
        yield None
        return
    if nvml.nvmlInit_v2() != 0:
        yield None
        return
    try:
        yield nvml
    finally:
        nvml.nvmlShutdown()


def _handles(nvml: ctypes.CDLL) -> list[tuple[str, ctypes.c_void_p]]:
    """Returns the GPUs that CUDA_VISIBLE_DEVICES leaves to this process, by their names there."""
    count = ctypes.c_uint()
    if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
        return []
    visible = os.environ.get(VISIBLE)
    names = [str(number) for number in range(count.value)] if visible is None else visible.split(",")
    found = []
    for name in (each.strip() for each in names):
        handle = ctypes.c_void_p()
        if name.isdigit():
            result = nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(int(name)), ctypes.byref(handle))
        else:
            result = nvml.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(handle))
        if result != 0:
            break  # as CUDA does: what follows an invalid name is not visible
        found.append((name, handle))
    return found


def _total(nvml: ctypes.CDLL, handle: ctypes.c_void_p) -> int:
    memory = _DeviceMemory()
    result = nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory))
    return int(memory.total) if result == 0 else 0
