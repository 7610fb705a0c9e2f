"""The functions of the C sources, with tensors for pointers.

They support only float32 on CPUs; callers use torch's operators for the rest.

Legend: T tokens, S sequences, E width of a row, H heads, D head dimension, N slots of the cache, C
columns of a slot, B blocks of the longest table.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, Structure, byref, c_double, c_float, c_int, c_int64, c_void_p
from dataclasses import astuple, dataclass
from pathlib import Path

import torch
from torch import Tensor

from ryzanstein.worker.model.cold_layout import ColdLayout, ItemKind
from ryzanstein.worker.model.draw import Draw
from ryzanstein.worker.model.layers.rotary import Angles

_RESULTS = {
    "float_packed_bytes": c_int64,
    "int8_packed_bytes": c_int64,
    "int8_product": c_int,
    "blocks_packed_bytes": c_int64,
    "blocks_product": c_int,
    "attend": c_int,
    "seal": c_int,
    "draw_rows": c_int,
}
_SMALLEST = torch.finfo(torch.float32).tiny
_OF_GGUF = {"Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8, "Q4_K": 12, "Q5_K": 13, "Q6_K": 14, "TQ2_0": 35}
_OF_GROUPS = {"G4_32": 432, "G4_64": 464, "G4_128": 4128, "G8_32": 832, "G8_64": 864, "G8_128": 8128}
BLOCKS = _OF_GGUF | _OF_GROUPS
"""The types of blocks that are multiplied as they are, and their ids in block_types.h.

Ids of GGUF's types are those of GGUF. G types are groups of so many inputs with 4-bit or unsigned
8-bit levels: a 16-bit scale, a 16-bit zero point, then for each 32 inputs the levels as Q4_0 or Q8_0
have them; a weight is scale * (level - zero).
"""
ITEM_KINDS: dict[ItemKind, int] = {"float16": 1, "fp8": 2, "int8": 3, "int8-channels": 4}
"""The ids of attention_pages.h."""
_ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "quick_gelu": 3, "relu": 4, "sigmoid": 5}  # of rows.c


class _Attention(Structure):
    """The struct Attention of attention_rows.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("q", "pages", "cold", "rows", "num_new", "length", "tables", "first")),
        *((name, c_void_p) for name in ("cold_tables", "cold_first", "begin", "end", "bias", "out", "lse")),
        *((name, c_int64) for name in ("q_stride", "out_stride", "columns", "values", "num_pages", "num_cold")),
        *((name, c_int64) for name in ("block_size", "num_sequences", "num_kv_heads", "group", "head_dim")),
        *((name, c_int64) for name in ("num_positions", "half", "key_kind", "value_kind", "hot", "window")),
        *((name, c_float) for name in ("scale", "cap")),
    )


class _Seal(Structure):
    """The struct Seal of attention_seal.c."""

    _fields_ = (
        *((name, c_void_p) for name in ("pages", "cold", "hot_pages", "cold_blocks")),
        *((name, c_int64) for name in ("columns", "values", "num_pages", "num_kv_heads", "head_dim")),
        *((name, c_int64) for name in ("half", "key_kind", "value_kind")),
    )


class _Draw(Structure):
    """The struct Draw of draw.c."""

    _fields_ = (
        *((name, c_int64) for name in ("row", "bits", "top_k", "least")),
        *((name, c_double) for name in ("rate", "top_p", "uniform")),
    )


_SIGNATURES = {
    "rms_norm": (c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_float, c_float),
    "rotate_and_store": (
        *(c_void_p, c_int64, c_int64, c_int64, c_int64, c_void_p, c_void_p, c_int64),
        *(c_int, c_int64, c_void_p, c_void_p, c_int64, c_int),
    ),
    "rotary_angles": (c_void_p, c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_int, c_float),
    "activate": (c_void_p, c_void_p, c_int64, c_int64, c_int),
    "activate_gate": (c_void_p, c_void_p, c_int64, c_int64, c_int),
    "quantize_to_float": (c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_float),
    "quantize_to_int8": (c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_float),
    "float_packed_bytes": (c_int64, c_int64, c_int),
    "float_pack": (c_void_p, c_void_p, c_int64, c_int64, c_int),
    "float_product": (c_void_p, c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_int),
    "float_product_by_head": (c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_int64),
    "float_product_unpacked": (c_void_p, c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_int64),
    "int8_packed_bytes": (c_int64, c_int64),
    "int8_pack": (c_void_p, c_void_p, c_int64, c_int64),
    "int8_product": (c_void_p, c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_int64, c_float),
    "int8_rows": (c_void_p, c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_int64),
    "transform_rows": (c_void_p, c_void_p, c_int64, c_int64, c_int64),
    "blocks_packed_bytes": (c_int64, c_int64, c_int),
    "blocks_pack": (c_void_p, c_int64, c_int64, c_void_p, c_int64, c_int64, c_int),
    "blocks_product": (c_void_p, c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_int, c_float),
    "blocks_rows": (c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_int),
    "attend": (POINTER(_Attention),),
    "seal": (POINTER(_Seal),),
    "greatest": (c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_int64),
    "restrict_rows": (c_void_p, c_int64, c_void_p, c_int64, c_void_p, c_int64, c_int64),
    "draw_rows": (c_void_p, c_int64, c_int64, POINTER(_Draw), c_void_p, c_int64),
}


@dataclass(frozen=True, slots=True)
class ColdKeys:
    """The tables of cold blocks, as `PagedKeys` has those of hot pages.

    A query at position p sees page j cold if p - (16 j + 15) is at least `hot_tokens`.
    """

    tables_SB: Tensor
    layout: ColdLayout
    hot_tokens: int
    first_S: Tensor | None = None


@dataclass(frozen=True, slots=True)
class PagedKeys:
    """The sequences with new tokens, as int64.

    For each: its first row in the step, its number of new tokens, its block table, and its number
    of keys. A new token sees itself and the keys before it, at most `window` keys including itself.
    `bias_HP` is added to a head's scores by the key's position. `first_S`: the page, by position, of
    which a table's first entry is; without it 0. `cold`: keys of older pages are there, and the
    tables are of hot pages only. Only keys of positions from `begin_S` on and before `end_S` count,
    where they are given; a token that sees none has the answer 0.
    """

    rows_S: Tensor
    num_new_S: Tensor
    tables_SB: Tensor
    length_S: Tensor
    block_size: int
    window: int | None = None
    bias_HP: Tensor | None = None
    first_S: Tensor | None = None
    cold: ColdKeys | None = None
    begin_S: Tensor | None = None
    end_S: Tensor | None = None


class NativeKernels:
    """A loaded library. Tensors' last dimension must be contiguous; shapes are not checked."""

    def __init__(self, library: Path) -> None:
        loaded = ctypes.CDLL(str(library))
        for name, types in _SIGNATURES.items():
            function = getattr(loaded, name)
            function.argtypes, function.restype = types, _RESULTS.get(name)
        self._rms_norm, self._rotate_and_store = loaded.rms_norm, loaded.rotate_and_store
        self._rotary_angles, self._activate, self._activate_gate = loaded.rotary_angles, loaded.activate, loaded.activate_gate
        self._quantize = {torch.float32: loaded.quantize_to_float, torch.int8: loaded.quantize_to_int8}
        self._attend, self._seal = loaded.attend, loaded.seal
        self._float_packed_bytes, self._float_pack = loaded.float_packed_bytes, loaded.float_pack
        self._int8_packed_bytes, self._int8_pack = loaded.int8_packed_bytes, loaded.int8_pack
        self._float_product, self._int8_product = loaded.float_product, loaded.int8_product
        self._int8_rows, self._transform_rows = loaded.int8_rows, loaded.transform_rows
        self._blocks_packed_bytes, self._blocks_pack = loaded.blocks_packed_bytes, loaded.blocks_pack
        self._blocks_product, self._blocks_rows = loaded.blocks_product, loaded.blocks_rows
        self._product_by_head, self._product_unpacked = loaded.float_product_by_head, loaded.float_product_unpacked
        self._greatest, self._restrict_rows, self._draw_rows = loaded.greatest, loaded.restrict_rows, loaded.draw_rows

    def rms_norm(self, x_TE: Tensor, weight_E: Tensor, eps: float, offset: float) -> Tensor:
        """Returns x / rms(x) * (offset + weight)."""
        x_TE = x_TE.contiguous()
        out_TE = torch.empty_like(x_TE)
        num_rows, width = x_TE.numel() // len(weight_E), len(weight_E)
        self._rms_norm(x_TE.data_ptr(), weight_E.data_ptr(), out_TE.data_ptr(), num_rows, width, eps, offset)
        return out_TE

    def rotary_angles(
        self, positions_T: Tensor, frequencies_R: Tensor, interleaved: bool, magnitude: float
    ) -> tuple[Tensor, Tensor]:
        """Returns cosine and signed sine of each position's angles, times magnitude, [T, 1, R]."""
        shape = len(positions_T), 1, len(frequencies_R)
        cos_T1R, sin_T1R = torch.empty(shape), torch.empty(shape)
        pointers = positions_T.data_ptr(), frequencies_R.data_ptr(), cos_T1R.data_ptr(), sin_T1R.data_ptr()
        self._rotary_angles(*pointers, shape[0], shape[2], interleaved, magnitude)
        return cos_T1R, sin_T1R

    def rotate(self, x_THD: Tensor, angles: Angles) -> None:
        """Rotates the first numbers of each head in place."""
        self._rotate_and_store(*_rotation(x_THD, angles), 0, None, None, 0, False)

    def rotate_and_store(self, qk_THD: Tensor, angles: Angles, kv_TC: Tensor, pages_NC: Tensor, slots_T: Tensor) -> None:
        """Rotates queries and keys in place, then copies keys and values `kv_TC` into their slots.

        The keys of `kv_TC` are a part of `qk_THD`.
        """
        self._rotate_and_store(
            *_rotation(qk_THD, angles),
            *(kv_TC.storage_offset() - qk_THD.storage_offset(), pages_NC.data_ptr(), slots_T.data_ptr()),
            *(kv_TC.shape[1], pages_NC.dtype == torch.float16),
        )

    def activate(self, x_TE: Tensor, activation: str) -> Tensor:
        """Returns activation(x). The name is an activation of an architecture, or sigmoid."""
        out_TE = torch.empty_like(x_TE)
        self._activate(x_TE.data_ptr(), out_TE.data_ptr(), *x_TE.shape, _ACTIVATIONS[activation])
        return out_TE

    def activate_gate(self, gate_up_T2E: Tensor, activation: str) -> Tensor:
        """Returns activation(gate) * up."""
        num_rows, width = len(gate_up_T2E), gate_up_T2E.shape[1] // 2
        out_TE = gate_up_T2E.new_empty((num_rows, width))
        self._activate_gate(gate_up_T2E.data_ptr(), out_TE.data_ptr(), num_rows, width, _ACTIVATIONS[activation])
        return out_TE

    def quantize_rows(self, x_TE: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Returns whole numbers in -127..127, as float32 or int8, and each row's scale [T, 1]."""
        x_TE = x_TE.contiguous()
        num_rows, width = x_TE.shape
        levels_TE, scale_T1 = torch.empty((num_rows, width), dtype=dtype), torch.empty((num_rows, 1))
        self._quantize[dtype](x_TE.data_ptr(), levels_TE.data_ptr(), scale_T1.data_ptr(), num_rows, width, _SMALLEST)
        return levels_TE, scale_T1

    def transform_rows(self, x_TE: Tensor, block: int) -> Tensor:
        """Returns the Hadamard transform of each `block` numbers of each row, without its factor.

        `block` is a power of two of at least 16 that divides the width, or 1.
        """
        x_TE = x_TE.contiguous()
        out_TE = torch.empty_like(x_TE)
        self._transform_rows(x_TE.data_ptr(), out_TE.data_ptr(), *x_TE.shape, block)
        return out_TE

    def float_packed_bytes(self, num_outputs: int, num_inputs: int, dtype: torch.dtype) -> int:
        """Returns the size of the result of `float_pack` for such a weight."""
        packed_bytes: int = self._float_packed_bytes(num_outputs, num_inputs, dtype == torch.float16)
        return packed_bytes

    def float_pack(self, weight_OI: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns a float32 weight packed for `float_product`, in float32 or float16."""
        weight_OI = weight_OI.contiguous()
        num_outputs, num_inputs = weight_OI.shape
        packed = torch.empty(self.float_packed_bytes(num_outputs, num_inputs, dtype) // dtype.itemsize, dtype=dtype)
        self._float_pack(weight_OI.data_ptr(), packed.data_ptr(), num_outputs, num_inputs, dtype == torch.float16)
        return packed

    def float_product(self, x_TI: Tensor, packed: Tensor, bias_O: Tensor | None, num_outputs: int) -> Tensor:
        """Returns x times a packed weight, plus the bias."""
        x_TI = x_TI.contiguous()
        num_rows, num_inputs = x_TI.shape
        out_TO = torch.empty((num_rows, num_outputs))
        self._float_product(
            *(x_TI.data_ptr(), packed.data_ptr(), None if bias_O is None else bias_O.data_ptr(), out_TO.data_ptr()),
            *(num_rows, num_inputs, num_outputs, packed.dtype == torch.float16),
        )
        return out_TO

    def float_product_unpacked(self, x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        """Returns x times an unpacked float32 weight, plus the bias."""
        x_TI = x_TI.contiguous()
        (num_rows, num_inputs), num_outputs = x_TI.shape, len(weight_OI)
        out_TO = torch.empty((num_rows, num_outputs))
        self._product_unpacked(
            *(x_TI.data_ptr(), weight_OI.data_ptr(), None if bias_O is None else bias_O.data_ptr(), out_TO.data_ptr()),
            *(num_rows, num_inputs, num_outputs),
        )
        return out_TO

    def float_product_by_head(self, x_HTI: Tensor, packed_H: Tensor, num_outputs: int) -> Tensor:
        """Returns each head's rows times the head's own weight.

        The rows of `packed_H` are results of `float_pack`, in float32.
        """
        x_HTI = x_HTI.contiguous()
        out_HTO = torch.empty((*x_HTI.shape[:2], num_outputs))
        self._product_by_head(x_HTI.data_ptr(), packed_H.data_ptr(), out_HTO.data_ptr(), *x_HTI.shape, num_outputs)
        return out_HTO

    def int8_packed_bytes(self, num_outputs: int, num_inputs: int) -> int:
        """Returns the size of the result of `int8_pack` for such a weight."""
        packed_bytes: int = self._int8_packed_bytes(num_outputs, num_inputs)
        return packed_bytes

    def int8_pack(self, levels_OI: Tensor) -> Tensor:
        """Returns a weight of whole numbers in -127..127, int8, packed for `int8_product`."""
        levels_OI = levels_OI.contiguous()
        num_outputs, num_inputs = levels_OI.shape
        packed = torch.empty(self.int8_packed_bytes(num_outputs, num_inputs), dtype=torch.uint8)
        self._int8_pack(levels_OI.data_ptr(), packed.data_ptr(), num_outputs, num_inputs)
        return packed

    def int8_product(self, x_TI: Tensor, packed: Tensor, scale_O: Tensor, block: int) -> Tensor:
        """Returns transformed and quantized rows times a packed weight, in float32. Raises MemoryError.

        `block`: see `transform_rows`; the weight was transformed so.
        """
        x_TI = x_TI.contiguous()
        (num_rows, num_inputs), num_outputs = x_TI.shape, len(scale_O)
        out_TO = torch.empty((num_rows, num_outputs))
        pointers = x_TI.data_ptr(), packed.data_ptr(), scale_O.data_ptr(), out_TO.data_ptr()
        if self._int8_product(*pointers, num_rows, num_inputs, num_outputs, block, _SMALLEST):
            raise MemoryError("no memory for the levels of rows")
        return out_TO

    def int8_rows(self, packed: Tensor, scale_O: Tensor, index_T: Tensor, num_inputs: int, block: int) -> Tensor:
        """Returns rows of a packed weight, transformed back. Rows that it does not have are zeros."""
        index_T = index_T.contiguous()
        out_TI = torch.empty((len(index_T), num_inputs))
        pointers = packed.data_ptr(), scale_O.data_ptr(), index_T.data_ptr(), out_TI.data_ptr()
        self._int8_rows(*pointers, len(index_T), num_inputs, len(scale_O), block)
        return out_TI

    def blocks_packed_bytes(self, num_outputs: int, num_inputs: int, kind: int) -> int:
        """Returns the size of a packed weight in blocks of a type, one of `BLOCKS`."""
        packed_bytes: int = self._blocks_packed_bytes(num_outputs, num_inputs, kind)
        return packed_bytes

    def blocks_pack(self, blocks_OB: Tensor, packed: Tensor, first: int, num_inputs: int, kind: int) -> None:
        """Packs rows of blocks, uint8, as outputs from `first` on. `packed` must begin as zeros."""
        num_rows, stride = len(blocks_OB), blocks_OB.stride(0)
        self._blocks_pack(blocks_OB.data_ptr(), stride, num_rows, packed.data_ptr(), first, num_inputs, kind)

    def blocks_product(self, x_TI: Tensor, packed: Tensor, bias_O: Tensor | None, num_outputs: int, kind: int) -> Tensor:
        """Returns quantized rows times a packed weight, plus the bias. Raises MemoryError."""
        x_TI = x_TI.contiguous()
        num_rows, num_inputs = x_TI.shape
        out_TO = torch.empty((num_rows, num_outputs))
        bias = None if bias_O is None else bias_O.data_ptr()
        pointers = x_TI.data_ptr(), packed.data_ptr(), bias, out_TO.data_ptr()
        if self._blocks_product(*pointers, num_rows, num_inputs, num_outputs, kind, _SMALLEST):
            raise MemoryError("no memory for the levels of rows")
        return out_TO

    def blocks_rows(self, packed: Tensor, index_T: Tensor, shape: tuple[int, int], kind: int) -> Tensor:
        """Returns rows of a packed weight [O, I] in float32. Rows that it does not have are zeros."""
        num_outputs, num_inputs = shape
        index_T = index_T.contiguous()
        out_TI = torch.empty((len(index_T), num_inputs))
        pointers = packed.data_ptr(), index_T.data_ptr(), out_TI.data_ptr()
        self._blocks_rows(*pointers, len(index_T), num_inputs, num_outputs, kind)
        return out_TI

    def attend(
        self,
        q_TKGD: Tensor,
        pages_NC: Tensor,
        keys: PagedKeys,
        scoring: tuple[float, float | None],
        out_TKGD: Tensor,
        *,
        cold_BX: Tensor | None = None,
        lse_TKG: Tensor | None = None,
    ) -> None:
        """Fills the sequences' rows of `out_TKGD`. Raises MemoryError.

        `scoring` is the scale and the cap of the scores. `cold_BX` are the layer's cold blocks, needed
        where `keys` has tables of them. `lse_TKG` gets the logarithm of each row's sum of exponentials.
        """
        arguments = _arguments(q_TKGD, pages_NC, keys, scoring, out_TKGD)
        if keys.cold is not None and cold_BX is not None:
            _add_cold(arguments, keys.cold, cold_BX)
        if lse_TKG is not None:
            arguments.lse = lse_TKG.data_ptr()
        if self._attend(byref(arguments)):
            raise MemoryError("no memory for the scores of attention")

    def seal(self, pages_NC: Tensor, hot_M: Tensor, cold_BX: Tensor, cold_M: Tensor, layout: ColdLayout) -> None:
        """Compresses pages of 16 slots into cold blocks, uint8. Raises MemoryError.

        `hot_M` are numbers of pages, `cold_M` those of blocks, as int64.
        """
        columns, width = pages_NC.shape[1], layout.num_kv_heads * layout.head_dim
        arguments = _Seal(
            *(pages_NC.data_ptr(), cold_BX.data_ptr(), hot_M.data_ptr(), cold_M.data_ptr()),
            *(columns, columns - width, len(hot_M), layout.num_kv_heads, layout.head_dim),
            *(pages_NC.dtype == torch.float16, ITEM_KINDS[layout.kind.keys], ITEM_KINDS[layout.kind.values]),
        )
        if self._seal(byref(arguments)):
            raise MemoryError("no memory to seal pages")

    def greatest(self, logits_SV: Tensor) -> tuple[Tensor, Tensor]:
        """Returns each row's greatest logit, or NaN if it has one, and the lowest token with it."""
        logits_SV = _rowwise(logits_SV)
        num_rows, size = logits_SV.shape
        best_S, token_S = torch.empty(num_rows), torch.empty(num_rows, dtype=torch.int64)
        pointers = logits_SV.data_ptr(), best_S.data_ptr(), token_S.data_ptr()
        self._greatest(*pointers, num_rows, logits_SV.stride(0), size)
        return best_S, token_S

    def restrict(self, logits_SV: Tensor, allowed_SW: Tensor) -> Tensor:
        """Returns a copy of float32 logits, minus infinity where the bit of a token is not set.

        `allowed_SW` has 32 tokens in each int32, the first in the lowest bit.
        """
        logits_SV, allowed_SW = _rowwise(logits_SV), _rowwise(allowed_SW)
        num_rows, size = logits_SV.shape
        out_SV = torch.empty(num_rows, size)
        sources = logits_SV.data_ptr(), logits_SV.stride(0), allowed_SW.data_ptr(), allowed_SW.stride(0)
        self._restrict_rows(*sources, out_SV.data_ptr(), num_rows, size)
        return out_SV

    def draw(self, logits_SV: Tensor, draws_R: Sequence[Draw]) -> Tensor:
        """Returns a token for each draw, [R]; -1 if the greatest logit of its row is not finite.

        Raises MemoryError.
        """
        logits_SV = _rowwise(logits_SV)
        token_R = torch.empty(len(draws_R), dtype=torch.int64)
        arguments = (_Draw * len(draws_R))(*(_Draw(*astuple(draw)) for draw in draws_R))
        source = logits_SV.data_ptr(), logits_SV.stride(0), logits_SV.shape[1]
        if self._draw_rows(*source, arguments, token_R.data_ptr(), len(draws_R)):
            raise MemoryError("no memory for the weights of tokens")
        return token_R


def _rowwise(x_SV: Tensor) -> Tensor:
    """Returns x with the numbers of each row contiguous."""
    return x_SV if x_SV.stride(1) == 1 else x_SV.contiguous()


def _rotation(x_THD: Tensor, angles: Angles) -> tuple[int, ...]:
    """Returns the arguments that describe what is rotated and by which angles."""
    num_tokens, num_heads, head_dim = x_THD.shape
    apart = x_THD.stride(1) if num_heads > 1 else head_dim
    cos, sin = angles.cos_T1R.data_ptr(), angles.sin_T1R.data_ptr()
    return (
        x_THD.data_ptr(),
        x_THD.stride(0),
        num_tokens,
        num_heads,
        apart,
        cos,
        sin,
        angles.cos_T1R.shape[-1],
        angles.interleaved,
    )


def _arguments(
    q_TKGD: Tensor, pages_NC: Tensor, keys: PagedKeys, scoring: tuple[float, float | None], out_TKGD: Tensor
) -> _Attention:
    scale, cap = scoring
    num_kv_heads, group, head_dim = q_TKGD.shape[1:]
    columns, bias_HP = pages_NC.shape[1], keys.bias_HP
    return _Attention(
        q=q_TKGD.data_ptr(),
        pages=pages_NC.data_ptr(),
        rows=keys.rows_S.data_ptr(),
        num_new=keys.num_new_S.data_ptr(),
        length=keys.length_S.data_ptr(),
        tables=keys.tables_SB.data_ptr(),
        first=_pointer(keys.first_S),
        begin=_pointer(keys.begin_S),
        end=_pointer(keys.end_S),
        bias=_pointer(bias_HP),
        out=out_TKGD.data_ptr(),
        q_stride=q_TKGD.stride(0),
        out_stride=out_TKGD.stride(0),
        columns=columns,
        values=columns - num_kv_heads * head_dim,
        num_pages=keys.tables_SB.shape[1],
        block_size=keys.block_size,
        num_sequences=len(keys.rows_S),
        num_kv_heads=num_kv_heads,
        group=group,
        head_dim=head_dim,
        num_positions=0 if bias_HP is None else bias_HP.shape[1],
        half=pages_NC.dtype == torch.float16,
        window=keys.window or 0,
        scale=scale,
        cap=cap or 0.0,
    )


def _add_cold(arguments: _Attention, cold: ColdKeys, cold_BX: Tensor) -> None:
    kind = cold.layout.kind
    arguments.cold, arguments.cold_tables = cold_BX.data_ptr(), cold.tables_SB.data_ptr()
    arguments.cold_first, arguments.num_cold = _pointer(cold.first_S), cold.tables_SB.shape[1]
    arguments.key_kind, arguments.value_kind = ITEM_KINDS[kind.keys], ITEM_KINDS[kind.values]
    arguments.hot = cold.hot_tokens


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
