"""Answers that are older than the wait for a node, struck by what takes every node at once."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

from ryzanstein.v1 import inference_pb2 as inference

# Long enough for any machine that still strikes after STRIKE_S; the client leaves when it has seen enough behind the strike.
LONG: dict[str, Any] = {"max_tokens": 2000, "n": 8, "ignore_eos": True}
WAIT_S = 15.0
STRIKE_S = WAIT_S + 2.0
FROZEN_S = 2.5
TOKENS_AFTER = 200


def struck_late(harness: Any, strike: Callable[[], None]) -> tuple[int, int]:
    """Strikes once an answer is STRIKE_S old. Its tokens then, and when the client left; indices are asserted while reading."""
    client, answer = harness.client, harness.new_answer()
    request = inference.StreamChatRequest(chat=client.request("Count from 1 to 60.", **LONG))
    stream = client.inference.StreamChat(request, timeout=240, metadata=(("x-cancel-on-disconnect", "true"),))
    began, at_strike = time.monotonic(), -1
    for response in stream:
        client.take(response.event, answer)
        num_tokens = sum(len(choice.token_ids) for choice in answer.choices.values())
        if at_strike < 0 and time.monotonic() - began > STRIKE_S:
            at_strike = num_tokens
            strike()
        if at_strike >= 0 and num_tokens > at_strike + TOKENS_AFTER and time.monotonic() - began > STRIKE_S + 2 * FROZEN_S:
            stream.cancel()
            return at_strike, num_tokens
    pytest.skip("this machine answers so fast that no answer becomes old enough")


def kill_a_rank_everywhere(harness: Any) -> None:
    for node_id in harness.cluster.node_ids:
        os.kill(harness.status(node_id).ranks[0].pid, signal.SIGKILL)


def freeze_all(harness: Any) -> None:
    for node_id in harness.cluster.node_ids:
        harness.cluster.kill(node_id, signal.SIGSTOP)
    time.sleep(FROZEN_S)
    for node_id in harness.cluster.node_ids:
        harness.cluster.kill(node_id, signal.SIGCONT)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("strike", [kill_a_rank_everywhere, freeze_all])
@pytest.mark.parametrize("layout", ["lone", "pair"])
def test_an_old_answer_waits_for_a_node_as_a_young_one_does(
    request: pytest.FixtureRequest, strike: Callable[[Any], None], layout: str
) -> None:
    harness = request.getfixturevalue(layout)
    before, after = struck_late(harness, lambda: strike(harness))
    assert after > before + TOKENS_AFTER
    harness.cluster.wait_nodes(len(harness.cluster.node_ids), 60)
