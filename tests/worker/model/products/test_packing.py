"""Packing in threads: the same products, errors at the end, a bounded number of weights at once."""

import threading
import time
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from ryzanstein.worker.products import Product
from ryzanstein.worker.products.half import FbgemmHalfProduct
from ryzanstein.worker.products.packing import Packing

LARGE = 2**20


def test_products_packed_in_threads_are_those_packed_at_once(
    normal: Callable[..., Tensor], threads: Callable[[int], object]
) -> None:
    weights, x_TI = [normal(seed, 64, 48) for seed in range(12)], normal(20, 5, 48)
    with threads(3), Packing() as packing:
        products = [packing.product(LARGE, partial(FbgemmHalfProduct, weight_OI, None)) for weight_OI in weights]
    for weight_OI, product in zip(weights, products, strict=True):
        assert torch.equal(product(x_TI), FbgemmHalfProduct(weight_OI, None)(x_TI))


@pytest.mark.parametrize(("count", "num_bytes"), [(1, LARGE), (2, LARGE - 1)], ids=["one thread", "a small weight"])
def test_what_gains_nothing_is_packed_by_the_loading_thread(
    threads: Callable[[int], object], count: int, num_bytes: int
) -> None:
    with threads(count), Packing() as packing:
        assert packing.product(num_bytes, partial(_identity, where := [])) is _same
    assert where == [threading.get_ident()]


def test_outside_of_loading_a_weight_is_packed_by_its_caller() -> None:
    assert Packing().product(LARGE, partial(_identity, where := [])) is _same
    assert where == [threading.get_ident()]


def test_at_most_one_weight_for_each_thread_waits(threads: Callable[[int], object]) -> None:
    packed: list[int] = []
    waiting: list[int] = []

    def pack(number: int) -> Product:
        time.sleep(0.01)
        packed.append(number)
        return _same

    with threads(2), Packing() as packing:
        for number in range(8):
            packing.product(LARGE, partial(pack, number))
            waiting.append(number + 1 - len(packed))
    assert max(waiting) == 2
    assert sorted(packed) == list(range(8))


@pytest.mark.parametrize("count", [1, 3])
def test_what_is_packed_is_told_as_it_is_and_whole_at_the_end(threads: Callable[[int], object], count: int) -> None:
    told: list[tuple[int, int]] = []
    with threads(count), Packing() as packing:
        packing.tell = lambda packed_bytes, given_bytes: told.append((packed_bytes, given_bytes))
        for _ in range(8):
            packing.product(LARGE, lambda: _same)
        packing.product(10, lambda: _same, at_once=True)
    assert told == sorted(told)
    assert all(packed <= given for packed, given in told)
    assert told[-1] == (8 * LARGE + 10,) * 2


def test_an_error_of_a_thread_is_raised_when_loading_ends_or_before(threads: Callable[[int], object]) -> None:
    started: list[int] = []

    def load() -> None:
        with threads(2), Packing() as packing:
            for number in range(20):
                started.append(number)
                packing.product(LARGE, partial(_fail_at_7, number))

    with pytest.raises(ValueError, match="weight 7"):
        load()
    assert len(started) < 20
    with pytest.raises(ValueError, match="weight 7"), threads(2), Packing() as packing:
        packing.product(LARGE, partial(_fail_at_7, 7))


def test_an_error_of_the_loading_thread_ends_the_threads_and_is_not_hidden(threads: Callable[[int], object]) -> None:
    def load() -> None:
        with threads(2), Packing() as packing:
            packing.product(LARGE, partial(_fail_at_7, 7))
            raise KeyError("missing")

    with pytest.raises(KeyError, match="missing"):
        load()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("pack")]


def test_later_threads_compute_with_as_many_threads_as_before(threads: Callable[[int], object]) -> None:
    seen: list[int] = []
    with threads(3):
        with Packing() as packing:
            packing.product(LARGE, lambda: _same)
        later = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
        later.start()
        later.join(timeout=60)
    assert seen == [3]


def _same(x_TI: Tensor) -> Tensor:
    return x_TI


def _identity(where: list[int]) -> Product:
    where.append(threading.get_ident())
    return _same


def _fail_at_7(number: int) -> Product:
    if number == 7:
        raise ValueError("weight 7")
    return _same
