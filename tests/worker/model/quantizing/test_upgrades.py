"""Which products get more bits: the order of the steps, and the search for how many are needed."""

import random

import pytest

from ryzanstein.tools.quantize.upgrades import EIGHT, FLOATS, LOW, UpgradeProduct, Upgrades


def some_products(count: int, seed: int) -> list[UpgradeProduct]:
    chance = random.Random(seed)
    lows = [10 ** chance.uniform(-5, -2) for _ in range(count)]
    return [
        UpgradeProduct((low, low / 200), (100 * size, 180 * size, 320 * size))
        for low in lows
        for size in [chance.randint(1, 4)]
    ]


def test_the_noisiest_product_of_its_size_comes_first() -> None:
    quiet, loud = UpgradeProduct((1e-4, 1e-6), (50, 90, 160)), UpgradeProduct((1e-2, 1e-4), (50, 90, 160))
    upgrades = Upgrades.of([quiet, loud])
    assert upgrades.formats(0) == [LOW, LOW]
    assert upgrades.formats(1) == [LOW, EIGHT]
    assert upgrades.formats(4) == [FLOATS, FLOATS]


def test_every_step_costs_bytes_and_removes_noise() -> None:
    upgrades = Upgrades.of(some_products(20, seed=1))
    counts = range(len(upgrades.steps))
    assert all(upgrades.noise(count + 1) <= upgrades.noise(count) for count in counts)
    assert all(upgrades.num_bytes(count + 1) > upgrades.num_bytes(count) for count in counts)
    assert upgrades.noise(len(upgrades.steps)) == 0


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("exponent", [0.7, 1.0, 1.4])
def test_the_search_keeps_the_budget_with_few_steps(seed: int, exponent: float) -> None:
    upgrades = Upgrades.of(some_products(60, seed))
    scale = 0.08 / upgrades.noise(0) ** exponent
    measured: list[int] = []

    def loss_of(count: int) -> tuple[float, float]:
        measured.append(count)
        loss = scale * upgrades.noise(count) ** exponent
        return loss, loss + 0.001

    count = upgrades.fewest_within(0.01, loss_of)
    assert count is not None
    assert loss_of(count)[1] <= 0.01
    fewest = next(steps for steps in range(121) if scale * upgrades.noise(steps) ** exponent + 0.001 <= 0.01)
    assert len(measured) <= 9
    assert upgrades.num_bytes(count) <= upgrades.num_bytes(fewest) * 1.15


def test_nothing_is_upgraded_where_the_fewest_bits_do() -> None:
    assert Upgrades.of(some_products(5, 0)).fewest_within(0.01, lambda count: (-0.001, 0.004)) == 0


def test_floats_alone_are_no_answer() -> None:
    assert Upgrades.of(some_products(5, 0)).fewest_within(0.01, lambda count: (float("inf"), float("inf"))) is None


def test_a_size_is_kept() -> None:
    upgrades = Upgrades.of(some_products(10, 2))
    bound = (upgrades.num_bytes(0) + upgrades.num_bytes(20)) // 2
    count = upgrades.most_within(bound)
    assert count is not None
    assert upgrades.num_bytes(count) <= bound < upgrades.num_bytes(count + 1)
    assert upgrades.most_within(upgrades.num_bytes(0) - 1) is None
