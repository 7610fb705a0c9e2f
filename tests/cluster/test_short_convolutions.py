"""A model with short convolutions on two nodes of two ranks: what it keeps of a token is reused, and survives its node.

Its cache is float16 and its weights are rounded: what is kept of a token has to be what was computed, in any dtype.
"""

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
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "block_auto_adjust_ff_dim": False,
    "max_position_embeddings": 2048,
    "layer_types": ["conv", "conv", "full_attention", "conv", "conv", "full_attention"],
}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    model_dir = write_model(tmp_path_factory.mktemp("models") / "lfm2", "Lfm2Config", SHAPE, 0.15)
    with LocalCluster(ClusterSpec(model_dir, tp=2, rank_flags=("--kv-dtype", "float16", "--quantization", "int8"))) as running:
        yield running


@pytest.fixture
def stub(cluster: LocalCluster) -> Iterator[InferenceServiceStub]:
    yield from connected(cluster)


def test_a_second_turn_computes_what_is_new_and_at_most_a_page(stub: InferenceServiceStub) -> None:
    prompt = prompt_of(701, 1)
    first = stub.Complete(asked(prompt, 90), timeout=60)
    assert first.usage.cached_prompt_tokens == 0
    turn = [*prompt, *first.choices[0].token_ids, *prompt_of(33, 2)]
    second = stub.Complete(asked(turn, 8), timeout=60)
    assert second.node_id == first.node_id
    assert 33 <= computed(second) <= 33 + PAGE


def test_another_continuation_of_the_same_prompt_computes_at_most_a_page_more(stub: InferenceServiceStub) -> None:
    """The convolution's last tokens are those of the prompt, not of the answer that was written after it."""
    prompt = prompt_of(600, 3)
    whole = stub.Complete(asked([*prompt, *prompt_of(20, 5)], 24), timeout=60)
    again = stub.Complete(asked([*prompt, *prompt_of(20, 5)], 24), timeout=60)
    assert again.usage.cached_prompt_tokens >= 600
    assert again.choices[0].token_ids == whole.choices[0].token_ids


def test_three_choices_are_the_one_alone(stub: InferenceServiceStub) -> None:
    """They share the prompt's pages, and write what follows apart."""
    prompt = prompt_of(205, 9)
    alone = stub.Complete(asked(prompt, 40), timeout=60)
    together = stub.Complete(asked(prompt, 40, n=3), timeout=60)
    assert [list(choice.token_ids) for choice in together.choices] == [list(alone.choices[0].token_ids)] * 3


def test_a_node_killed_in_an_answer_changes_no_token(stub: InferenceServiceStub, cluster: LocalCluster) -> None:
    survives_its_node(stub, cluster, asked(prompt_of(300, 7), 120))
