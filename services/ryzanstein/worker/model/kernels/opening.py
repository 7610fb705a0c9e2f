"""Decides whether a rank uses our own kernels or torch's operators, and records why."""

from __future__ import annotations

from dataclasses import dataclass

from ryzanstein.worker.model.kernels.build import library
from ryzanstein.worker.model.kernels.compiling import NotBuilt
from ryzanstein.worker.model.kernels.native import NativeKernels
from ryzanstein.worker.model.kernels.openmp import share_openmp
from ryzanstein.worker.model.kernels.packaged import packaged_library
from ryzanstein.worker.model.options import RunnerOptions
from ryzanstein.worker.model.refusal import ModelRefused

COMPILED = "compiled for this machine"


@dataclass(frozen=True, slots=True)
class OpenedKernels:
    """The kernels of a rank. `native` None: torch's operators are used, for the `reason`.

    `library` tells which library they are of: compiled for this machine, or the wheel's for a level.
    """

    native: NativeKernels | None
    reason: str = ""
    library: str = ""


def open_kernels(options: RunnerOptions) -> OpenedKernels:
    """Returns the kernels: compiled for this machine if there is a compiler, else the wheel's.

    Raises ModelRefused if they are required but not available.
    """
    if options.kernels == "torch":
        return OpenedKernels(None, "chosen")
    wanted = f"{options.torch_dtype} on {options.device}".removeprefix("torch.")
    if wanted != "float32 on cpu":
        return _without(options, f"no native kernels for {wanted}")
    try:
        return OpenedKernels(NativeKernels(library()), library=COMPILED)
    except (NotBuilt, OSError) as error:
        return _packaged(options, str(error))


def _packaged(options: RunnerOptions, not_compiled: str) -> OpenedKernels:
    """Returns the wheel's kernels. `not_compiled`: why there are none for this very machine."""
    try:
        found = packaged_library()
        share_openmp()
        return OpenedKernels(NativeKernels(found.path), library=f"packaged for {found.level.name} ({not_compiled})")
    except (NotBuilt, OSError) as error:
        return _without(options, f"{not_compiled}; {error}")


def _without(options: RunnerOptions, reason: str) -> OpenedKernels:
    if options.kernels == "native":
        raise ModelRefused(f"kernels native: {reason}")
    return OpenedKernels(None, reason)
