"""Which experts are chosen, and what they weigh, where little decides."""

from dataclasses import replace

import pytest
import torch

from ryzanstein.worker.architectures.registry import spec_of
from ryzanstein.worker.architectures.spec import DecoderSpec, GroupLimit, MoeSpec, RoutingSpec
from ryzanstein.worker.model.layers.routing import ExpertRouter
from ryzanstein.worker.products.adapted import AdapterSites

HIDDEN, NUM_EXPERTS = 4, 6


class Tensors:
    """A WeightSource over tensors in memory, for a model in bfloat16."""

    kernels = None
    adapters = AdapterSites()

    def __init__(self, router_XE: torch.Tensor, correction_X: torch.Tensor) -> None:
        self._tensors = {"mlp.gate.weight": router_XE, "mlp.gate.e_score_correction_bias": correction_X}

    def new(self, *shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.bfloat16)

    def read(self, name: str, shape: tuple[int, ...], out: torch.Tensor, dim: int = 0, start: int = 0) -> None:
        assert self._tensors[name].shape == shape
        out.copy_(self._tensors[name])


@pytest.fixture
def spec() -> DecoderSpec:
    shape = {"hidden_size": HIDDEN, "num_hidden_layers": 1, "num_attention_heads": 1, "vocab_size": 5}
    moe = {"n_routed_experts": NUM_EXPERTS, "num_experts_per_tok": 1, "n_group": 1, "topk_group": 1}
    config = {"model_type": "deepseek_v3", **shape, **moe, "intermediate_size": 8, "moe_intermediate_size": 8}
    return spec_of({**config, "max_position_embeddings": 16})


def route(
    spec: DecoderSpec, routing: RoutingSpec, top_k: int, router_XE: torch.Tensor, correction_X: torch.Tensor
) -> tuple[list[float], list[int]]:
    """The weights and experts of one token that is all ones."""
    moe = MoeSpec(NUM_EXPERTS, top_k, 8, routing)
    weights, chosen = ExpertRouter(Tensors(router_XE, correction_X), spec, "", moe)(torch.ones(1, HIDDEN, dtype=torch.bfloat16))
    return weights[0].tolist(), chosen[0].tolist()


CORRECTED = RoutingSpec("sigmoid", normalized=True, scale=3.0, corrected=True)


def test_corrections_that_bfloat16_cannot_tell_apart_decide(spec: DecoderSpec) -> None:
    corrections = torch.tensor([5.0, 5.0, 5.0, 5.0, 5.001, 5.0])
    assert route(spec, CORRECTED, 1, torch.zeros(NUM_EXPERTS, HIDDEN), corrections) == ([3.0], [4])


def test_corrections_choose_and_do_not_weigh(spec: DecoderSpec) -> None:
    routers = torch.zeros(NUM_EXPERTS, HIDDEN)
    corrections = torch.tensor([0.0, 9.0, 0.0, 0.0, -9.0, 8.0])
    assert route(spec, replace(CORRECTED, normalized=False), 2, routers, corrections) == ([1.5, 1.5], [1, 5])


def test_scores_that_all_underflow_weigh_nothing(spec: DecoderSpec) -> None:
    weights, _ = route(spec, CORRECTED, 2, torch.full((NUM_EXPERTS, HIDDEN), -99.0), torch.zeros(NUM_EXPERTS))
    assert weights == [0.0, 0.0]


@pytest.mark.parametrize(("num_rated", "expected"), [(1, {0, 1, 2}), (2, {3, 4, 5})])
def test_a_group_is_rated_by_its_best_experts(spec: DecoderSpec, num_rated: int, expected: set[int]) -> None:
    corrections = torch.tensor([4.0, 0.0, 0.0, 3.0, 3.0, 0.0])
    routing = replace(CORRECTED, groups=GroupLimit(2, 1, num_rated))
    _, chosen = route(spec, routing, 3, torch.zeros(NUM_EXPERTS, HIDDEN), corrections)
    assert set(chosen) == expected
