"""Packs weights in its own threads while the loading thread reads the next weights.

FBGEMM packs with one thread and takes longer than reading. Products are returned at once, but may
be used only after the `Packing` is left. Until then at most one weight per thread is in memory
twice.

Legend: T rows, I inputs, O outputs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from types import TracebackType

import torch
from torch import Tensor

from ryzanstein.worker.products import Product
from ryzanstein.worker.products.native import NativeWeight, native_weights

_MAX_THREADS = 8
_WORTH_BYTES = 2**20


class Packing:
    """A context manager around the loading of a model.

    Its exit waits for pending packing and raises its errors. Outside of it, on a rank with one
    thread, and for small weights, a product is packed before it is returned. `tell` gets the bytes packed
    so far and those given so far, in the loading thread.
    """

    def __init__(self) -> None:
        self.tell: Callable[[int, int], None] = lambda packed_bytes, given_bytes: None
        self._packed_bytes = self._given_bytes = 0
        self._num_threads = 1
        self._pool: ThreadPoolExecutor | None = None
        self._pending: dict[Future[None], _PackedLater] = {}

    def __enter__(self) -> Packing:
        self._num_threads = torch.get_num_threads()
        if self._num_threads > 1:
            self._pool = ThreadPoolExecutor(self._max_pending, "pack", torch.set_num_threads, (1,))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            while error is None and self._pending:
                self._collect()
        finally:
            self._end_threads()
            _give_back_freed()

    def _end_threads(self) -> None:
        if self._pool is None:
            return
        self._pool.shutdown(cancel_futures=True)
        self._pool = None
        self._pending.clear()
        torch.set_num_threads(self._num_threads)  # the pool set the default of later threads too

    def product(self, weight_bytes: int, pack: Callable[[], Product], *, at_once: bool = False) -> Product:
        """Returns what `pack` makes, now or in a thread. Raises what an earlier `pack` raised."""
        self._count(0, weight_bytes)
        if at_once or self._pool is None or weight_bytes < _WORTH_BYTES:
            product = pack()
            self._count(weight_bytes, 0)
            return product
        if len(self._pending) == self._max_pending:
            self._collect()
        later = _PackedLater(weight_bytes, pack)
        self._pending[self._pool.submit(later.pack)] = later
        return later

    @property
    def _max_pending(self) -> int:
        return min(self._num_threads, _MAX_THREADS)

    def _collect(self) -> None:
        for future in wait(self._pending, return_when=FIRST_COMPLETED).done:
            later = self._pending.pop(future)
            later.forget_weight()
            future.result()
            self._count(later.weight_bytes, 0)

    def _count(self, packed_bytes: int, given_bytes: int) -> None:
        self._packed_bytes += packed_bytes
        self._given_bytes += given_bytes
        self.tell(self._packed_bytes, self._given_bytes)


def _give_back_freed() -> None:
    """Returns memory that packing freed to the system.

    glibc would keep it, up to a quarter of the 8-bit weights. With other C libraries this does
    nothing.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class _PackedLater:
    """A product that is packed in another thread.

    The loading thread, which allocated the weight's memory, also frees it; the packing thread does
    not.
    """

    def __init__(self, weight_bytes: int, pack: Callable[[], Product]) -> None:
        self.weight_bytes = weight_bytes
        self._pack: Callable[[], Product] | None = pack
        self._product: Product

    def pack(self) -> None:
        assert self._pack is not None, "a weight is packed once"
        self._product = self._pack()

    def forget_weight(self) -> None:
        self._pack = None

    def __call__(self, x_TI: Tensor) -> Tensor:
        return self._product(x_TI)

    def native(self) -> Sequence[NativeWeight]:
        return native_weights(self._product)
