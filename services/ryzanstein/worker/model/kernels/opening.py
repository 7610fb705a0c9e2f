"""Whether a rank computes with kernels of our own or with torch's operators, and why."""

from __future__ import annotations

from dataclasses import dataclass

from ryzanstein.worker.model.kernels.build import NotBuilt, library
from ryzanstein.worker.model.kernels.native import NativeKernels
from ryzanstein.worker.model.options import RunnerOptions
from ryzanstein.worker.model.refusal import ModelRefused


@dataclass(frozen=True, slots=True)
class OpenedKernels:
    """`native` None: torch's operators, for the `reason`."""

    native: NativeKernels | None
    reason: str = ""


def open_kernels(options: RunnerOptions) -> OpenedKernels:
    """Compiles them where needed. Raises ModelRefused where they are demanded and cannot be had."""
    if options.kernels == "torch":
        return OpenedKernels(None, "chosen")
    wanted = f"{options.torch_dtype} on {options.device}".removeprefix("torch.")
    if wanted != "float32 on cpu":
        return _without(options, f"there are none for {wanted}")
    try:
        return OpenedKernels(NativeKernels(library()))
    except (NotBuilt, OSError) as error:
        return _without(options, str(error))


def _without(options: RunnerOptions, reason: str) -> OpenedKernels:
    if options.kernels == "native":
        raise ModelRefused(f"kernels native: {reason}")
    return OpenedKernels(None, reason)
