"""A model with attention sinks and experts on two nodes of two ranks, whose older keys and values are in 8 bits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tests.cluster.random_models import asked, computed, connected, prompt_of, survives_its_node, write_model

from ryzanstein.cli.processes.cluster import ClusterSpec, LocalCluster
from ryzanstein.v1.inference_pb2_grpc import InferenceServiceStub

pytestmark = pytest.mark.long

PAGE = 16
SHAPE: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 96,
    "sliding_window": 64,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "max_position_embeddings": 4096,
}


@pytest.fixture(scope="module", params=["none", "eager-fp8"])
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    model_dir = write_model(tmp_path_factory.mktemp("models") / "gpt_oss", "GptOssConfig", SHAPE, 0.1)
    with LocalCluster(ClusterSpec(model_dir, tp=2, worker_flags=("--kv-compression", request.param))) as running:
        yield running


@pytest.fixture
def stub(cluster: LocalCluster) -> Iterator[InferenceServiceStub]:
    yield from connected(cluster)


def test_a_second_turn_computes_what_is_new_and_at_most_a_page(stub: InferenceServiceStub) -> None:
    prompt = prompt_of(701, 1)
    first = stub.Complete(asked(prompt, 90), timeout=60)
    second = stub.Complete(asked([*prompt, *first.choices[0].token_ids, *prompt_of(33, 2)], 8), timeout=60)
    assert 33 <= computed(second) <= 33 + PAGE


def test_three_choices_are_the_one_alone(stub: InferenceServiceStub) -> None:
    prompt = prompt_of(205, 9)
    alone = stub.Complete(asked(prompt, 40), timeout=60)
    together = stub.Complete(asked(prompt, 40, n=3), timeout=60)
    assert [list(choice.token_ids) for choice in together.choices] == [list(alone.choices[0].token_ids)] * 3


def test_a_node_killed_in_an_answer_changes_no_token(stub: InferenceServiceStub, cluster: LocalCluster) -> None:
    survives_its_node(stub, cluster, asked(prompt_of(300, 7), 120))
