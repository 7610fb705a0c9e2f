"""Decides whether a rank uses our own kernels or torch's operators, and records why."""

from __future__ import annotations

from dataclasses import dataclass

from ryzanstein.worker.kernels.build import found, library
from ryzanstein.worker.kernels.compilers import NotBuilt
from ryzanstein.worker.kernels.native import NativeKernels
from ryzanstein.worker.kernels.openmp import share_openmp
from ryzanstein.worker.kernels.packaged import packaged_library
from ryzanstein.worker.refusal import ModelRefused
from ryzanstein.worker.settings.options import RunnerOptions

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
    """Returns the kernels: the package's if it has some for this CPU, else those compiled for this machine.

    They are compiled now if `options.compiles_kernels`. Raises ModelRefused if kernels are required
    but not available.
    """
    if options.kernels == "torch":
        return OpenedKernels(None, "chosen")
    wanted = f"{options.torch_dtype} on {options.device}".removeprefix("torch.")
    if wanted != "float32 on cpu":
        return _without(options, f"no native kernels for {wanted}")
    try:
        return _packaged()
    except (NotBuilt, OSError) as error:
        return _compiled(options, str(error))


def _packaged() -> OpenedKernels:
    packaged = packaged_library()
    share_openmp()
    return OpenedKernels(NativeKernels(packaged.path), library=f"packaged for {packaged.level.name}")


def _compiled(options: RunnerOptions, not_packaged: str) -> OpenedKernels:
    """Returns the kernels compiled for this machine. `not_packaged`: why the package's are not used."""
    try:
        path = library() if options.compiles_kernels else found()
        return OpenedKernels(NativeKernels(path), library=COMPILED)
    except (NotBuilt, OSError) as error:
        return _without(options, f"{error}; {not_packaged}")


def _without(options: RunnerOptions, reason: str) -> OpenedKernels:
    if options.kernels == "native":
        raise ModelRefused(f"kernels native: {reason}")
    return OpenedKernels(None, reason)
