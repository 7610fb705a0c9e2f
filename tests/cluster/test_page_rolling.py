"""Every node is replaced in turn, as for an upgrade: no turn of a conversation is computed again."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from ryzanstein.cli.rollout.drain import drain_node

pytestmark = pytest.mark.cluster

LONG = " ".join(f"Item {i} is number {7 * i}." for i in range(60))


def test_every_node_is_replaced_in_turn_and_no_turn_is_computed_again(stormy: Any) -> None:
    computed = []

    def turn(text: str) -> None:
        answer = stormy.client.chat(text, session_id="rolling", max_tokens=24, ignore_eos=True)
        computed.append(answer.prompt_tokens - answer.usage.cached_prompt_tokens)

    turn(LONG)
    for node_id in stormy.cluster.node_ids:
        turn("And then?")
        assert asyncio.run(drain_node(stormy.cluster.services[node_id].grpc_address, 10.0)) == 0
        turn("Why?")
        stormy.cluster.restart(node_id)
        stormy.wait_at_least(3)
        turn("Who says so?")
    assert computed[0] > 500
    assert max(computed[1:]) < 100, computed
