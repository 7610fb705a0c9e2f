"""The functions of the C sources, loaded from one library.

They support only float32 on CPUs; callers use torch's operators for the rest.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

from ryzanstein.worker.kernels.functions.adapters import AdapterFunctions
from ryzanstein.worker.kernels.functions.attention import AttentionFunctions
from ryzanstein.worker.kernels.functions.blocks import BlockFunctions
from ryzanstein.worker.kernels.functions.int8 import Int8Functions
from ryzanstein.worker.kernels.functions.recurrent.delta import DeltaFunctions
from ryzanstein.worker.kernels.functions.recurrent.mamba import MambaFunctions
from ryzanstein.worker.kernels.functions.recurrent.slots import TailFunctions
from ryzanstein.worker.kernels.functions.rows import FloatFunctions, RotationFunctions, RowFunctions
from ryzanstein.worker.kernels.functions.sampling import SamplingFunctions
from ryzanstein.worker.kernels.functions.steps.meeting import MeetingFunctions
from ryzanstein.worker.kernels.functions.steps.program import ProgramFunctions


class NativeKernels:
    """A loaded library. Tensors' last dimension must be contiguous; shapes are not checked."""

    def __init__(self, library: Path) -> None:
        loaded = ctypes.CDLL(str(library))
        self.rows, self.rotation = RowFunctions(loaded), RotationFunctions(loaded)
        self.floats, self.int8, self.blocks = FloatFunctions(loaded), Int8Functions(loaded), BlockFunctions(loaded)
        self.attention, self.sampling = AttentionFunctions(loaded), SamplingFunctions(loaded)
        self.adapters = AdapterFunctions(loaded)
        self.delta = DeltaFunctions(loaded)
        self.mamba = MambaFunctions(loaded)
        self.tails = TailFunctions(loaded)
        self.program = ProgramFunctions(loaded)
        self.meeting = MeetingFunctions(loaded)
