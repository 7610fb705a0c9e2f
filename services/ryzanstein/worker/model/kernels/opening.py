"""Decides whether a rank uses our own kernels or torch's operators, and records why."""

from __future__ import annotations

from dataclasses import dataclass

from ryzanstein.worker.model.kernels.build import NotBuilt, library
from ryzanstein.worker.model.kernels.native import NativeKernels
from ryzanstein.worker.model.options import RunnerOptions
from ryzanstein.worker.model.refusal import ModelRefused


@dataclass(frozen=True, slots=True)
class OpenedKernels:
    """The kernels of a rank. `native` None: torch's operators are used, for the `reason`."""

    native: NativeKernels | None
    reason: str = ""


def open_kernels(options: RunnerOptions) -> OpenedKernels:
    """Returns the kernels, compiled if needed.

    Raises ModelRefused if they are required but not available.
    """
    if options.kernels == "torch":
        return OpenedKernels(None, "chosen")
    wanted = f"{options.torch_dtype} on {options.device}".removeprefix("torch.")
    if wanted != "float32 on cpu":
        return _without(options, f"no native kernels for {wanted}")
    try:
        return OpenedKernels(NativeKernels(library()))
    except (NotBuilt, OSError) as error:
        return _without(options, str(error))


def _without(options: RunnerOptions, reason: str) -> OpenedKernels:
    if options.kernels == "native":
        raise ModelRefused(f"kernels native: {reason}")
    return OpenedKernels(None, reason)
