"""The kernels of Mamba 2 against torch's operators, and against themselves however a prompt is cut."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.worker.model.kernels.test_delta import NUM_SLOTS

from ryzanstein.worker.architectures.mixers import MambaSpec
from ryzanstein.worker.cache.state_sizes import MambaShare
from ryzanstein.worker.cache.states import LayerStates
from ryzanstein.worker.engine.plan import StateRun, StepPlan
from ryzanstein.worker.kernels.functions.recurrent.mamba import GroupScales, MambaHeads
from ryzanstein.worker.kernels.native import NativeKernels
from ryzanstein.worker.model.inputs.layout import CacheLayout, FedTokens
from ryzanstein.worker.model.inputs.states.inputs import StateInputs
from ryzanstein.worker.model.layers.recurrent.convolution import NativeConvolution, TorchConvolution
from ryzanstein.worker.model.layers.recurrent.mamba_native import NativeMamba
from ryzanstein.worker.model.layers.recurrent.mamba_rule import TorchMamba

# Heads, groups, numbers of a head, rows of its matrix, tokens of the convolution.
SHAPES = [(4, 1, 8, 16, 4), (6, 3, 7, 11, 3), (2, 2, 64, 128, 4), (4, 2, 70, 33, 2), (2, 1, 200, 8, 1), (3, 1, 32, 128, 4)]
Shape = tuple[int, int, int, int, int]


class Layer:
    """One layer with random numbers, its slots, and both ways to compute it."""

    def __init__(self, shape: Shape, kernels: NativeKernels, *, gated_first: bool = True) -> None:
        self.random = torch.Generator().manual_seed(0)
        self.mamba = MambaSpec(*shape)
        self.share = MambaShare(self.mamba, 0, self.mamba.num_heads, 0, self.mamba.num_groups, False)
        self.num_channels, self.gated_first = self.share.slot.num_channels, gated_first
        heads = MambaHeads(*(self.new(self.mamba.num_heads) for _ in range(3)), (0.05, 3.0))
        weights = self.new(self.mamba.length, self.num_channels), self.new(self.num_channels)
        self.native = NativeConvolution(kernels.tails, self.share.slot, *weights), NativeMamba(kernels.mamba, self.share, heads)
        self.torch = TorchConvolution(*weights), TorchMamba(self.share, heads)
        self.scales = GroupScales(self.new(self.mamba.width), self.mamba.width // self.mamba.num_groups, 1e-5)

    def new(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.random)

    def tokens(self, count: int) -> list[torch.Tensor]:
        """Channels, steps and gates. Rows are wider than what is read of them, as those of a product."""
        width, heads = self.mamba.width, self.mamba.num_heads
        return [self.new(count, self.num_channels + 5), self.new(count, heads + 3), self.new(count, width + 2)]

    def states(self) -> LayerStates:
        return LayerStates(torch.zeros(NUM_SLOTS + 2, self.share.slot.num_numbers), self.share.slot)

    def run(
        self, ways: Any, states: LayerStates, tokens: list[torch.Tensor], context: list[int], runs: list[list[StateRun]]
    ) -> torch.Tensor:
        num_new = [sum(count for count, _, _ in own) for own in runs]
        plan = StepPlan(1, [0] * sum(num_new), num_new, context, [], [], runs=[each for own in runs for each in own])
        cache: Any = type("Slots", (), {"num_slots": NUM_SLOTS})()
        inputs = StateInputs(plan, FedTokens.of(plan), cache, CacheLayout(1, 1, torch.device("cpu")))
        convolve, rule = ways
        mixed = convolve(tokens[0][:, : self.num_channels], states, inputs)
        steps, gates = tokens[1][:, : self.mamba.num_heads], tokens[2][:, : self.mamba.width]
        out = rule.scan(mixed, steps, gates if self.gated_first else None, states, inputs)
        normed: torch.Tensor = rule.norm(out, rule.squares(out), self.scales, None if self.gated_first else gates)
        return normed


@pytest.mark.parametrize("gated_first", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_kernels_equal_torch(shape: Shape, gated_first: bool, kernels: NativeKernels) -> None:
    layer = Layer(shape, kernels, gated_first=gated_first)
    first, second = layer.tokens(40), layer.tokens(9)
    results = []
    for ways in (layer.native, layer.torch):
        states = layer.states()
        out = [layer.run(ways, states, first, [0, 0], [[(20, -1, 3), (13, 3, 4)], [(7, -1, 5)]])]
        out.append(layer.run(ways, states, second, [33, 20, 7], [[(1, 4, 0)], [(2, 3, 1), (5, 1, 6)], [(1, 5, 2)]]))
        results.append((out, states.slots_NW))
    (ours, our_slots), (theirs, their_slots) = results
    for one, other in zip([*ours, our_slots], [*theirs, their_slots], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    assert ours[0].abs().mean() > 0.01


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("count", [1, 2])
def test_bits_do_not_depend_on_cuts_or_threads(
    shape: Shape, count: int, kernels: NativeKernels, threads: Callable[[int], Any]
) -> None:
    layer = Layer(shape, kernels)
    tokens, rng = layer.tokens(70), random.Random(1)
    states = layer.states()
    expected = layer.run(layer.native, states, tokens, [0], [[(70, -1, 0)]])
    final = states.slots_NW[0].clone()
    with threads(count):
        for _ in range(5):
            states, parts, at, slot = layer.states(), [], 0, -1
            while at < 70:
                begin, num = at, min(rng.choice([1, 2, 17, 40]), 70 - at)
                target = rng.choice([each for each in range(NUM_SLOTS) if each != slot])
                parts.append(
                    layer.run(
                        layer.native, states, [each[begin : at + num] for each in tokens], [begin], [[(num, slot, target)]]
                    )
                )
                at, slot = at + num, target
            assert torch.equal(torch.cat(parts).view(torch.int32), expected.view(torch.int32))
            assert torch.equal(states.slots_NW[slot], final)


def test_a_slot_that_is_read_stays_as_it_is(kernels: NativeKernels) -> None:
    layer = Layer(SHAPES[0], kernels)
    states, tokens = layer.states(), layer.tokens(6)
    layer.run(layer.native, states, tokens, [0], [[(6, -1, 3)]])
    before = states.slots_NW.clone()
    again = [layer.run(layer.native, states, tokens, [6], [[(6, 3, 4)]]) for _ in range(2)]
    assert torch.equal(*again)
    assert torch.equal(states.slots_NW[3], before[3])
    assert not states.slots_NW[NUM_SLOTS].any()


@pytest.mark.parametrize("place", ["channels", "steps", "gates"])
def test_a_number_that_is_not_finite_stays_in_its_sequence(place: str, kernels: NativeKernels) -> None:
    layer = Layer(SHAPES[0], kernels)
    tokens = layer.tokens(8)
    runs: list[list[StateRun]] = [[(4, -1, 0)], [(4, -1, 1)]]
    expected = layer.run(layer.native, layer.states(), tokens, [0, 0], runs)
    tokens[("channels", "steps", "gates").index(place)][2] = torch.nan
    found = layer.run(layer.native, layer.states(), tokens, [0, 0], runs)
    assert found[2].isnan().any()
    assert torch.equal(found[4:], expected[4:])
