"""What low-rank adapters (Hu et al. 2021, "LoRA") add to the results of products.

A layer whose weights can be adapted opens an `AdapterSite`. A slot is a number that stands for an adapter; each site keeps
this rank's part of the factors of every slot. What is added to a row depends on the row and its adapter alone where our own
kernels compute.

Legend: T rows of a step, N those with an adapter, I inputs, R ranks, O outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from ctypes import addressof
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ryzanstein.worker.kernels.functions.adapters import FACTORS, AdaptedStruct, SiteStruct
from ryzanstein.worker.kernels.native import NativeKernels

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class AdapterRows:
    """The rows of a step that have an adapter, those of one adapter together.

    A segment is a slot, and where its rows begin and end in `index_N`.
    """

    slot_T: Integers
    """Of each row; 0: none."""
    index_N: Integers
    segments_S3: Integers
    index: Tensor
    """`index_N`, where the model computes."""

    @classmethod
    def of(cls, slot_T: Integers, device: torch.device) -> AdapterRows | None:
        """Returns the rows of a step, or None if none has an adapter."""
        order_T = np.argsort(slot_T, kind="stable")
        index_N = order_T[np.count_nonzero(slot_T == 0) :]
        if not len(index_N):
            return None
        slots_S, first_S = np.unique(slot_T[index_N], return_index=True)
        ends_S = np.append(first_S[1:], len(index_N))
        segments_S3 = np.stack((slots_S, first_S, ends_S), axis=1).astype(np.int64)
        return cls(slot_T, index_N, segments_S3, torch.from_numpy(index_N).to(device))

    def part(self, rows: slice | Integers) -> AdapterRows | None:
        """Returns some of the rows, numbered anew."""
        return AdapterRows.of(self.slot_T[rows], self.index.device)


@dataclass(frozen=True, slots=True)
class LowRankFactors:
    """What an adapter adds to a whole weight's results: `scale` times x times `a_IR` times `b_RO`, plus the bias.

    A and B are both of float32, or both of float16. Behind the numbers come 64 bytes that may be read.
    """

    a_IR: Tensor
    b_RO: Tensor
    bias_O: Tensor | None = None
    scale: float = 1.0
    """A power of two."""


@dataclass(frozen=True, slots=True)
class AdaptableWeight:
    """A weight of a site: its name, its whole shape, and which of the inputs the rows have that this rank multiplies."""

    name: str
    num_inputs: int
    num_outputs: int
    own_inputs: tuple[int, int]
    adds_bias: bool = True

    def own(self, factors: LowRankFactors) -> LowRankFactors:
        """Returns this rank's part: views."""
        own_IR = factors.a_IR.narrow(0, *self.own_inputs)
        return replace(factors, a_IR=own_IR, bias_O=factors.bias_O if self.adds_bias else None)


Piece = tuple[int, int, int, int]
"""The number of a weight, the first of some of its outputs, how many they are, and the first's column in the result."""


class AdapterSite:
    """The results of one product, whose columns are pieces of weights.

    Several names may be in one product, and one name in several pieces.
    """

    def __init__(self, weights: Sequence[AdaptableWeight], pieces: Sequence[Piece], native: NativeKernels | None) -> None:
        self._weights, self._pieces, self._native = weights, pieces, native
        self._slots: dict[int, list[LowRankFactors | None]] = {}
        self._ranks: dict[int, int] = {}
        self._structs: dict[int, Integers] = {}
        self._nothing = np.zeros((len(weights), FACTORS), np.int64)
        self._addresses = np.zeros(0, np.int64)
        self._pieces_P4 = np.array(pieces, np.int64).reshape(-1, 4)
        self._site = SiteStruct(pieces=self._pieces_P4.ctypes.data, num_weights=len(weights), num_pieces=len(pieces))

    def map(self, slot: int, find: Callable[[str], LowRankFactors | None]) -> None:
        """Keeps this rank's part of an adapter. `find` returns the factors of a weight by its name, if it has any."""
        found = [(weight, find(weight.name)) for weight in self._weights]
        factors = [None if whole is None else weight.own(whole) for weight, whole in found]
        if any(each is not None for each in factors):
            self._slots[slot] = factors
            self._ranks[slot] = max(len(each.b_RO) for each in factors if each is not None)
            self._tell(slot, np.array([_struct(each) for each in factors], np.int64))

    def drop(self, slot: int) -> None:
        """Forgets an adapter."""
        if self._slots.pop(slot, None) is not None:
            del self._ranks[slot]
            self._tell(slot, self._nothing)

    def add(self, x_TI: Tensor, out_TO: Tensor, rows: AdapterRows) -> None:
        """Adds to a product's result what each row's adapter adds."""
        if not self._slots:
            return
        if self._native is None:
            for factors, index in self._segments(rows):
                self._add_pieces(out_TO, index, [_low(x_TI[index], each) for each in factors], factors)
        else:
            self._call(self._native, x_TI, None, out_TO, rows)

    def add_rows(self, ids_T: Tensor, out_TO: Tensor, rows: AdapterRows) -> None:
        """Adds the same to what was looked up: x has a single 1, at each row's id. A negative id adds nothing."""
        if not self._slots:
            return
        if self._native is not None:
            self._call(self._native, None, ids_T, out_TO, rows)
            return
        for factors, among in self._segments(rows):
            index = among[ids_T[among] >= 0]
            low = [None if each is None else each.a_IR[ids_T[index]].float() * each.scale for each in factors]
            self._add_pieces(out_TO, index, low, factors)

    def _segments(self, rows: AdapterRows) -> list[tuple[list[LowRankFactors | None], Tensor]]:
        segments = rows.segments_S3.tolist()
        return [(self._slots[slot], rows.index[begin:end]) for slot, begin, end in segments if slot in self._slots]

    def _add_pieces(
        self, out_TO: Tensor, index: Tensor, low: Sequence[Tensor | None], factors: Sequence[LowRankFactors | None]
    ) -> None:
        for weight, start, count, to in self._pieces:
            each, low_NR = factors[weight], low[weight]
            if each is None or low_NR is None:
                continue
            sums = low_NR @ each.b_RO[:, start : start + count].float()
            if each.bias_O is not None:
                sums += each.bias_O[start : start + count]
            out_TO[index, to : to + count] += sums.to(out_TO.dtype)

    def _call(
        self, native: NativeKernels, x_TI: Tensor | None, ids_T: Tensor | None, out_TO: Tensor, rows: AdapterRows
    ) -> None:
        num_rows = len(rows.index_N)
        self.reach(int(rows.segments_S3[-1, 0]))
        low = torch.empty(num_rows * self.low_floats)
        own = self._weights[0].own_inputs[1]
        asked = AdaptedStruct(
            ids=None if ids_T is None else ids_T.data_ptr(),
            site=self.address,
            segments=rows.segments_S3.ctypes.data,
            index=rows.index_N.ctypes.data,
            low=low.data_ptr(),
            num_inputs=own,
            num_rows=num_rows,
            num_segments=len(rows.segments_S3),
            num_ids=own,
        )
        native.adapters.add(asked, x_TI, out_TO, num_rows * self._site.low_stride * (own + out_TO.shape[1]))

    @property
    def address(self) -> int:
        """Where our own kernels find what is mapped, as long as this site exists."""
        return addressof(self._site)

    @property
    def low_floats(self) -> int:
        """The numbers between the factors, for each row and each of two chains, that our own kernels need room for."""
        return 2 * self._site.num_weights * self._site.low_stride

    def reach(self, last: int) -> None:
        """Makes slots up to `last` known to our own kernels. Those that adapt nothing here have what says so."""
        if last >= len(self._addresses):
            known = self._addresses
            self._addresses = np.full(2 * (last + 1), self._nothing.ctypes.data, np.int64)
            self._addresses[: len(known)] = known
            self._site.slots = self._addresses.ctypes.data

    def _tell(self, slot: int, structs: Integers) -> None:
        """Writes down where a slot's factors are."""
        if self._native is None:
            return
        self.reach(slot)
        self._structs[slot] = structs
        self._addresses[slot] = structs.ctypes.data
        self._site.low_stride = max(self._ranks.values(), default=0)


def _low(x_NI: Tensor, factors: LowRankFactors | None) -> Tensor | None:
    return None if factors is None else (x_NI.float() @ factors.a_IR.float()) * factors.scale


def _struct(factors: LowRankFactors | None) -> tuple[int, ...]:
    if factors is None:
        return (0,) * FACTORS
    bias = 0 if factors.bias_O is None else factors.bias_O.data_ptr()
    scale = int(np.float32(factors.scale).view(np.int32)) | (factors.a_IR.dtype == torch.float16) << 32
    return factors.a_IR.data_ptr(), factors.b_RO.data_ptr(), bias, len(factors.b_RO), factors.b_RO.stride(0), scale


class AdapterSites:
    """All sites of a decoder on one rank. A site that is not among them adapts nothing."""

    def __init__(self, native: NativeKernels | None = None) -> None:
        self._native = native
        self._sites: list[AdapterSite] = []
        self.shapes: dict[str, tuple[int, int]] = {}
        """The inputs and outputs of each weight that can be adapted, whole, by name."""
        self.low_floats = 0
        """At least the room that a site needs for a row, see `AdapterSite.low_floats`."""

    def open(self, weights: Sequence[AdaptableWeight], pieces: Sequence[Piece]) -> AdapterSite:
        """Returns a new site."""
        site = AdapterSite(weights, pieces, self._native)
        self._sites.append(site)
        self.shapes |= {weight.name: (weight.num_inputs, weight.num_outputs) for weight in weights}
        return site

    def map(self, slot: int, factors: Mapping[str, LowRankFactors]) -> None:
        """Keeps an adapter: its factors of whole weights, by name, whose memory must stay as it is until it is dropped."""
        for site in self._sites:
            site.drop(slot)
            site.map(slot, factors.get)
            site.reach(slot)
        self.low_floats = max((site.low_floats for site in self._sites), default=0)

    def drop(self, slot: int) -> None:
        """Forgets an adapter, if there is one."""
        for site in self._sites:
            site.drop(slot)
