"""A model whose layers have heads of their own, and share keys, on two nodes of two ranks."""

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
    "vocab_size_per_layer_input": 1024,
    "hidden_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 32,
    "hidden_size_per_layer_input": 16,
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
    "intermediate_size": 96,
    "sliding_window": 64,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "max_position_embeddings": 4096,
}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    model_dir = write_model(tmp_path_factory.mktemp("models") / "gemma4", "Gemma4TextConfig", SHAPE, 0.1)
    with LocalCluster(ClusterSpec(model_dir, tp=2)) as running:
        yield running


@pytest.fixture
def stub(cluster: LocalCluster) -> Iterator[InferenceServiceStub]:
    yield from connected(cluster)


def test_a_second_turn_computes_what_is_new_and_at_most_a_page(stub: InferenceServiceStub) -> None:
    prompt = prompt_of(701, 1)
    first = stub.Complete(asked(prompt, 90), timeout=60)
    second = stub.Complete(asked([*prompt, *first.choices[0].token_ids, *prompt_of(33, 2)], 8), timeout=60)
    assert 33 <= computed(second) <= 33 + PAGE


def test_a_node_killed_in_an_answer_changes_no_token(stub: InferenceServiceStub, cluster: LocalCluster) -> None:
    survives_its_node(stub, cluster, asked(prompt_of(300, 7), 120))
