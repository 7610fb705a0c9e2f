"""Packs weights in threads of its own while the loading thread reads the next ones.

FBGEMM packs with one thread and takes longer than reading does. Products are given out at once and may be used when the packing
has been left: until then at most one weight for each thread is in memory twice.

Legend: T rows, I inputs, O outputs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from concurrent.futures import ALL_COMPLETED, FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from types import TracebackType

import torch
from torch import Tensor

from ryzanstein.worker.model.products import Product

_MAX_THREADS = 8
_WORTH_BYTES = 2**20


class Packing:
    """A context manager that a model is loaded in. Leaving it waits for what is still packed and raises what failed.

    Outside of it, on a rank with one thread, and for small weights, a product is packed before it is given out.
    """

    def __init__(self) -> None:
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
            if error is None:
                self._collect(ALL_COMPLETED)
        finally:
            self._end_threads()
            _give_back_freed()

    def _end_threads(self) -> None:
        if self._pool is None:
            return
        self._pool.shutdown(cancel_futures=True)
        self._pool = None
        self._pending.clear()
        torch.set_num_threads(self._num_threads)  # what the pool's threads set is also the default of later threads

    def product(self, weight_bytes: int, pack: Callable[[], Product]) -> Product:
        """What `pack` returns. Raises what an earlier one raised."""
        if self._pool is None or weight_bytes < _WORTH_BYTES:
            return pack()
        if len(self._pending) == self._max_pending:
            self._collect(FIRST_COMPLETED)
        later = _PackedLater(pack)
        self._pending[self._pool.submit(later.pack)] = later
        return later

    @property
    def _max_pending(self) -> int:
        return min(self._num_threads, _MAX_THREADS)

    def _collect(self, when: str) -> None:
        for future in wait(self._pending, return_when=when).done:
            self._pending.pop(future).forget_weight()
            future.result()


def _give_back_freed() -> None:
    """To the system what packing has freed: glibc would keep it, up to a quarter of the 8-bit weights. Elsewhere nothing."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class _PackedLater:
    """The weight's memory is given back by the loading thread, which also takes it: not by the one that packed it."""

    def __init__(self, pack: Callable[[], Product]) -> None:
        self._pack: Callable[[], Product] | None = pack
        self._product: Product

    def pack(self) -> None:
        assert self._pack is not None, "a weight is packed once"
        self._product = self._pack()

    def forget_weight(self) -> None:
        self._pack = None

    def __call__(self, x_TI: Tensor) -> Tensor:
        return self._product(x_TI)
