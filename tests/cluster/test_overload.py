"""A real cluster that is asked for several times what it can do: who is served is served well, the others are told at once."""

from __future__ import annotations

import contextlib
import json
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from ryzanstein.rpc.status import error_from_rpc

pytestmark = pytest.mark.long


def warm_up(client: Any) -> None:
    """Until both nodes know their pace."""
    for i in range(8):
        client.chat(f"hello {i}", max_tokens=60, ignore_eos=True)


def test_when_every_node_is_too_busy_the_client_learns_when_to_come_back(busy: Any) -> None:
    client = busy.client
    warm_up(client)

    def ask(i: int) -> Any:
        try:
            return client.chat(f"Tell me about {i}.", max_tokens=400, ignore_eos=True)
        except grpc.RpcError as failure:
            return error_from_rpc(failure)  # type: ignore[arg-type]

    with ThreadPoolExecutor(40) as pool:
        answers = list(pool.map(ask, range(40)))
    served = [answer for answer in answers if hasattr(answer, "choices")]
    refused = [answer for answer in answers if not hasattr(answer, "choices")]
    assert all(len(answer.token_ids) == 400 for answer in served)
    assert {answer.node_id for answer in served} == set(busy.cluster.node_ids)
    assert len(refused) >= 10
    assert {error.reason for error in refused} == {"QUEUE_FULL"}
    assert all(0 < error.retry_after_s <= 60 for error in refused)
    assert client.chat("still there?", max_tokens=5, ignore_eos=True).token_ids, "no node is blamed for being busy"


def test_over_http_a_refusal_is_a_429_with_retry_after_and_never_a_stream(busy: Any) -> None:
    warm_up(busy.client)

    def post(i: int) -> tuple[int, Any]:
        body = {"messages": [{"role": "user", "content": f"Say {i}."}], "max_tokens": 400, "ignore_eos": True, "stream": True}
        request = urllib.request.Request(
            f"{busy.cluster.http_url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as failure:
            return failure.code, failure.headers

    with ThreadPoolExecutor(40) as pool:
        answers = list(pool.map(post, range(40)))
    refused = [headers for status, headers in answers if status == 429]
    assert {status for status, _ in answers} == {200, 429}
    assert len(refused) >= 10
    assert all(int(headers["Retry-After-Ms"]) >= 50 for headers in refused)
    broken = [text for status, text in answers if status == 200 and '"error"' in text]
    assert not broken, "a refusal comes before the stream"


def test_a_deadline_that_no_node_can_meet_is_refused_long_before_it_passes(busy: Any) -> None:
    client = busy.client
    warm_up(client)
    with ThreadPoolExecutor(16) as pool:
        load = [
            pool.submit(lambda i=i: _ignored(lambda: client.chat(f"{i}", max_tokens=900, ignore_eos=True))) for i in range(12)
        ]
        time.sleep(0.3)
        began = time.monotonic()
        with pytest.raises(grpc.RpcError) as failure:
            client.inference.Chat(client.request("quick", max_tokens=900, ignore_eos=True), timeout=0.8)
        took_s = time.monotonic() - began
        for future in load:
            future.result()
    error = error_from_rpc(failure.value)  # type: ignore[arg-type]
    assert error.reason in ("DEADLINE_UNREACHABLE", "QUEUE_FULL")
    assert took_s < 0.7


def _ignored(call: Any) -> None:
    with contextlib.suppress(grpc.RpcError):
        call()
