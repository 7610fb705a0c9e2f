"""The gated delta rule's kernels against torch's operators, and against themselves however a prompt is cut."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ryzanstein.worker.architectures.mixers import DeltaSpec
from ryzanstein.worker.cache.state_sizes import DeltaShare
from ryzanstein.worker.cache.states import LayerStates
from ryzanstein.worker.engine.plan import StateRun, StepPlan
from ryzanstein.worker.kernels.native import NativeKernels
from ryzanstein.worker.model.inputs.layout import CacheLayout, FedTokens
from ryzanstein.worker.model.inputs.states.inputs import StateInputs
from ryzanstein.worker.model.inputs.states.runs import StateRuns
from ryzanstein.worker.model.layers.recurrent.convolution import NativeConvolution, TorchConvolution
from ryzanstein.worker.model.layers.recurrent.delta_native import NativeDelta
from ryzanstein.worker.model.layers.recurrent.delta_rule import HeadNumbers, TorchDelta

NUM_SLOTS = 12
SHAPES: list[tuple[Any, ...]] = [
    *((2, 4, 16, 8, 4), (1, 3, 10, 7, 3), (3, 3, 128, 128, 4), (2, 2, 33, 70, 2), (1, 2, 8, 200, 1)),
    (3, 6, 16, 8, 4, True),
]


class Layer:
    """One layer with random numbers, its slots, and both ways to compute it."""

    def __init__(self, shape: tuple[Any, ...], kernels: NativeKernels, seed: int = 0) -> None:
        self.random = torch.Generator().manual_seed(seed)
        delta = DeltaSpec(*shape)
        self.share = DeltaShare(delta, 0, delta.num_key_heads, delta.num_value_heads)
        numbers = HeadNumbers(*(self.new(size) for size in (delta.num_value_heads,) * 2), self.new(delta.value_dim), 1e-6)
        self.num_channels = self.share.slot.num_channels
        weight_LF = self.new(delta.length, self.num_channels)
        self.native = (
            NativeConvolution(kernels.tails, self.share.slot, weight_LF, None),
            NativeDelta(kernels.delta, self.share, numbers),
        )
        self.torch = TorchConvolution(weight_LF, None), TorchDelta(self.share, numbers)

    def new(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.random)

    def tokens(self, count: int) -> list[torch.Tensor]:
        """Channels, strengths and gates. Rows are wider than what is read of them, as those of a product."""
        width = self.share.num_value_heads * self.share.delta.value_dim
        return [
            self.new(count, self.num_channels + 5),
            self.new(count, 2 * self.share.num_value_heads),
            self.new(count, width),
        ]

    def states(self) -> LayerStates:
        return LayerStates(torch.zeros(NUM_SLOTS + 2, self.share.slot.num_numbers), self.share.slot)


def run(
    ways: tuple[Any, Any], states: LayerStates, tokens: list[torch.Tensor], context: list[int], runs: list[list[StateRun]]
) -> torch.Tensor:
    num_new = [sum(count for count, _, _ in own) for own in runs]
    plan = StepPlan(1, [0] * sum(num_new), num_new, context, [], [], runs=[each for own in runs for each in own])
    cache = type("Slots", (), {"num_slots": NUM_SLOTS})()
    inputs = StateInputs(plan, FedTokens.of(plan), cache, CacheLayout(1, 1, torch.device("cpu")))
    convolve, rule = ways
    mixed = convolve(tokens[0][:, : states.shape.num_channels], states, inputs)
    out: torch.Tensor = rule(mixed, tokens[1], tokens[2], states, inputs)
    return out


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_kernel_equals_torch(shape: tuple[Any, ...], kernels: NativeKernels) -> None:
    layer = Layer(shape, kernels)
    first, second = layer.tokens(40), layer.tokens(9)
    results = []
    for ways in (layer.native, layer.torch):
        states = layer.states()
        out = [run(ways, states, first, [0, 0], [[(20, -1, 3), (13, 3, 4)], [(7, -1, 5)]])]
        out.append(run(ways, states, second, [33, 20, 7], [[(1, 4, 0)], [(2, 3, 1), (5, 1, 6)], [(1, 5, 2)]]))
        results.append((out, states.slots_NW))
    (ours, our_slots), (theirs, their_slots) = results
    for one, other in zip([*ours, our_slots], [*theirs, their_slots], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    assert ours[0].abs().mean() > 0.01


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("count", [1, 2])
def test_bits_do_not_depend_on_cuts_or_threads(
    shape: tuple[Any, ...], count: int, kernels: NativeKernels, threads: Callable[[int], Any]
) -> None:
    layer = Layer(shape, kernels)
    tokens, rng = layer.tokens(70), random.Random(1)
    states = layer.states()
    expected = run(layer.native, states, tokens, [0], [[(70, -1, 0)]])
    final = states.slots_NW[0].clone()
    with threads(count):
        for _ in range(5):
            states, parts, at, slot = layer.states(), [], 0, -1
            while at < 70:
                runs: list[StateRun] = []
                begin = at
                for _ in range(rng.randint(1, 3)):
                    num = min(rng.choice([1, 2, 17, 40]), 70 - at)
                    if num:
                        target = rng.choice([each for each in range(NUM_SLOTS) if each != slot])
                        runs.append((num, slot, target))
                        at, slot = at + num, target
                parts.append(run(layer.native, states, [each[begin:at] for each in tokens], [begin], [runs]))
            assert torch.equal(torch.cat(parts).view(torch.int32), expected.view(torch.int32))
            assert torch.equal(states.slots_NW[slot], final)


def test_a_slot_that_is_read_stays_as_it_is(kernels: NativeKernels) -> None:
    layer = Layer(SHAPES[0], kernels)
    states, tokens = layer.states(), layer.tokens(6)
    run(layer.native, states, tokens, [0], [[(6, -1, 3)]])
    before = states.slots_NW.clone()
    again = [run(layer.native, states, tokens, [6], [[(6, 3, 4)]]) for _ in range(2)]
    assert torch.equal(*again)
    assert torch.equal(states.slots_NW[3], before[3])
    assert not states.slots_NW[NUM_SLOTS].any()


@pytest.mark.parametrize("place", ["channels", "strengths", "gates"])
def test_a_number_that_is_not_finite_stays_in_its_sequence(place: str, kernels: NativeKernels) -> None:
    layer = Layer(SHAPES[0], kernels)
    tokens = layer.tokens(8)
    runs: list[list[StateRun]] = [[(4, -1, 0)], [(4, -1, 1)]]
    expected = run(layer.native, layer.states(), tokens, [0, 0], runs)
    tokens[("channels", "strengths", "gates").index(place)][2] = torch.nan
    found = run(layer.native, layer.states(), tokens, [0, 0], runs)
    assert found[2].isnan().any()
    assert torch.equal(found[4:], expected[4:])


@pytest.mark.parametrize(
    ("runs", "context", "what"),
    [
        ([(3, -1, 0)], [0], "runs of"),
        ([(4, -1, 0)], [5], "no state to begin with"),
        ([], [5], "runs of"),
        ([(4, NUM_SLOTS, 0)], [5], "12 slots"),
        ([(4, 0, NUM_SLOTS)], [5], "12 slots"),
        ([(2, -1, 0), (3, 0, 1)], [0], "runs of"),
        ([(4, -1, 0), (0, 0, 1)], [0], "runs of"),
    ],
)
def test_runs_that_do_not_fit_are_refused(runs: list[StateRun], context: list[int], what: str) -> None:
    plan = StepPlan(1, [0] * 4, [4], context, [], [], runs=runs)
    with pytest.raises(ValueError, match=what):
        StateRuns.of(plan, NUM_SLOTS)
