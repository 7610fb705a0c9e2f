"""Models that keep states, on two nodes of two ranks: states are resumed from, and an answer survives its node."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tests.cluster.random_models import asked, computed, connected, prompt_of, survives_its_node, write_model

from ryzanstein.cli.processes.cluster import ClusterSpec, LocalCluster
from ryzanstein.v1.inference_pb2_grpc import InferenceServiceStub

pytestmark = pytest.mark.long

PAGE, INTERVAL = 16, 512
SHAPE: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "max_position_embeddings": 4096,
}
DELTA: dict[str, Any] = {
    **SHAPE,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}


MAMBA: dict[str, Any] = {
    **{key: SHAPE[key] for key in SHAPE if key != "head_dim"},
    "num_local_experts": 0,
    "layer_types": ["mamba", "mamba", "mamba", "attention"] * 2,
    "mamba_n_heads": 8,
    "mamba_d_state": 32,
    "shared_intermediate_size": 96,
}
MODELS = {"delta": ("Qwen3_5TextConfig", DELTA), "mamba": ("GraniteMoeHybridConfig", MAMBA)}


@pytest.fixture(scope="module", params=MODELS)
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    model_dir = write_model(tmp_path_factory.mktemp("models") / request.param, *MODELS[request.param], 0.1)
    with LocalCluster(ClusterSpec(model_dir, tp=2)) as running:
        yield running


@pytest.fixture
def stub(cluster: LocalCluster) -> Iterator[InferenceServiceStub]:
    yield from connected(cluster)


def test_a_second_turn_computes_what_is_new_and_at_most_two_pages(stub: InferenceServiceStub) -> None:
    prompt = prompt_of(1301, 1)
    first = stub.Complete(asked(prompt, 90), timeout=60)
    assert first.usage.cached_prompt_tokens == 0
    turn = [*prompt, *first.choices[0].token_ids, *prompt_of(33, 2)]
    second = stub.Complete(asked(turn, 24), timeout=60)
    assert second.node_id == first.node_id
    assert 33 <= computed(second) <= 33 + 2 * PAGE
    cold = stub.Complete(asked([*turn, *second.choices[0].token_ids], 1), timeout=60)
    assert computed(cold) <= 2 * PAGE


def test_a_prompt_that_differs_in_the_middle_computes_at_most_an_interval_more(stub: InferenceServiceStub) -> None:
    prompt = prompt_of(1500, 3)
    stub.Complete(asked(prompt, 8), timeout=60)
    other = stub.Complete(asked([*prompt[:1400], *prompt_of(50, 4)], 24), timeout=60)
    assert computed(other) <= 50 + INTERVAL
    again = stub.Complete(asked([*prompt[:1400], *prompt_of(50, 4)], 24), timeout=60)
    assert computed(again) <= 2 * PAGE
    assert again.choices[0].token_ids == other.choices[0].token_ids


def test_choices_of_one_prompt_are_those_of_requests_alone(stub: InferenceServiceStub) -> None:
    prompt = prompt_of(420, 6)
    sampling = {"temperature": 1.0, "seed": 5}
    many = stub.Complete(asked(prompt, 30, n=4, **sampling), timeout=60)
    alone = stub.Complete(asked(prompt, 30, **sampling), timeout=60)
    assert many.choices[0].token_ids == alone.choices[0].token_ids
    assert len({tuple(choice.token_ids) for choice in many.choices}) == 4


def test_a_node_killed_in_an_answer_changes_no_token(stub: InferenceServiceStub, cluster: LocalCluster) -> None:
    survives_its_node(stub, cluster, asked(prompt_of(600, 7), 120))
