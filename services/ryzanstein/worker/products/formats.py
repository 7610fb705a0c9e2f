"""The format in which weights are stored for their products, chosen for the whole model.

Legend: I inputs, O outputs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property, partial

import torch
from torch import Tensor

from ryzanstein.worker.kernels.functions.blocks import BLOCKS, BlockFunctions
from ryzanstein.worker.kernels.native import NativeKernels
from ryzanstein.worker.products import Product
from ryzanstein.worker.products.blocks import Blocks, PackedBlocks, pack, packed_bytes
from ryzanstein.worker.products.by_rows import ByRows
from ryzanstein.worker.products.fastest import FastestKernels, KernelChoice
from ryzanstein.worker.products.floats import copies_kept, float_product
from ryzanstein.worker.products.half import half_product
from ryzanstein.worker.products.int8 import FillRows, Int8Product, Int8Table, KernelType
from ryzanstein.worker.products.packing import Packing
from ryzanstein.worker.refusal import ModelRefused
from ryzanstein.worker.settings.quantization import Format

_HALF_BYTES = 2
_HALF_INPUTS = 512  # FBGEMM stores whole blocks of so many inputs
_INT8_OUTPUT_BYTES = 8  # a scale and a sum of weights


class WeightFormat:
    """A factory of products; inside `packing` it packs in threads.

    Raises ModelRefused if the device or the dtype does not support the quantization.
    """

    def __init__(
        self, quantization: Format, device: torch.device, dtype: torch.dtype, kernels: NativeKernels | None = None
    ) -> None:
        self._quantization, self._native = quantization, kernels
        self.packing = Packing()
        if quantization == "none":
            return
        if device.type != "cpu" or dtype != torch.float32:
            raise ModelRefused(f"quantization {quantization} needs float32 on a CPU, not {dtype} on {device}")
        if quantization == "fp16" and "fbgemm" not in torch.backends.quantized.supported_engines:
            raise ModelRefused("quantization fp16: this build of torch lacks FBGEMM")

    def product(self, weight_OI: Tensor, bias_O: Tensor | None, *, kept: bool = False) -> Product:
        """Returns the product with a weight, which the caller may release.

        `kept`: the caller keeps it for another reader.
        """
        if self._quantization == "none" or not len(weight_OI):  # no outputs: an expert of another rank
            pack = partial(float_product, weight_OI, bias_O, self._native, kept=kept)
            return self.packing.product(weight_OI.nbytes, pack, at_once=True)
        if self._quantization == "fp16":
            return self.packing.product(weight_OI.nbytes, partial(half_product, weight_OI, bias_O, self._native))
        choice = self._kernels.of_shape(*weight_OI.shape)
        return self.packing.product(weight_OI.nbytes, partial(self._int8, weight_OI, bias_O, choice))

    def added_bytes(self, weight_OI: Tensor, *, kept: bool) -> int:
        """Returns by how many bytes memory grows when a weight becomes a product.

        The result is negative if memory shrinks.
        """
        if not kept:
            return self.packed_bytes(weight_OI) - weight_OI.nbytes
        return self.packed_bytes(weight_OI) if self._quantization != "none" or copies_kept(weight_OI) else 0

    def packed_bytes(self, weight_OI: Tensor) -> int:
        """Returns the bytes that a product of such a weight keeps."""
        num_outputs, num_inputs = weight_OI.shape
        if not num_outputs:
            return 0
        if self._quantization == "int8":
            kinds = self._kernels.of_shape(num_outputs, num_inputs).kinds
            return len(kinds) * num_outputs * (num_inputs + _INT8_OUTPUT_BYTES)
        if self._native is not None:
            dtype = torch.float16 if self._quantization == "fp16" else torch.float32
            return self._native.floats.packed_bytes(num_outputs, num_inputs, dtype)
        if self._quantization == "fp16":
            return num_outputs * math.ceil(num_inputs / _HALF_INPUTS) * _HALF_INPUTS * _HALF_BYTES
        return weight_OI.nbytes

    def table(self, shape: tuple[int, int], fill: FillRows) -> Int8Table | None:
        """Returns a weight that is looked up as well, or None if its floats are kept for that."""
        return Int8Table.read(shape, fill, self._native) if self._quantization == "int8" and self._native else None

    def empty_table(self, shape: tuple[int, int]) -> Int8Table | None:
        """Returns what `table` returns, on the meta device, without reading."""
        device = torch.device("meta")
        return Int8Table.empty(shape, self._native, device) if self._quantization == "int8" and self._native else None

    def kept_blocks(self, blocks: Blocks | None) -> Blocks | None:
        """Returns blocks that stay as they are, None for those that become floats."""
        if blocks is None or self._native is None or self._quantization != "none" or blocks.kind.name not in BLOCKS:
            return None
        return blocks

    def blocks_bytes(self, parts: Sequence[Blocks], num_outputs: int) -> int:
        """Returns the bytes of a packed weight of such parts."""
        return packed_bytes(self._block_functions, (num_outputs, parts[0].shape[1]), parts[0].kind)

    def packed_blocks(self, parts: Sequence[Blocks], num_outputs: int, memory: Tensor) -> PackedBlocks:
        """Packs parts of one type into `memory`, zero bytes; on the meta device nothing is packed."""
        return pack(self._block_functions, parts, num_outputs, memory)

    @property
    def _block_functions(self) -> BlockFunctions:
        assert self._native is not None, "blocks are kept where there are kernels"
        return self._native.blocks

    def _int8(self, weight_OI: Tensor, bias_O: Tensor | None, choice: KernelChoice) -> Product:
        def product(kind: KernelType) -> Product:
            return Int8Product.of(weight_OI, bias_O, kind, self._native)

        if choice.few is choice.many:
            return product(choice.few)
        return ByRows(product(choice.few), product(choice.many), choice.from_rows)

    @cached_property
    def _kernels(self) -> FastestKernels:
        return FastestKernels(self._native)
