"""WebSocket traffic that is meant to stop a router: each ends as it should, slows nobody else, and leaves nothing."""

from __future__ import annotations

import contextlib
import json
import socket
import time

import pytest
from tests.hostile.measure import socket_row
from tests.hostile.socket_corpus import HANDSHAKE, SOCKETS, HostileSocket, attack, message
from tests.hostile.victim import Victim
from websockets.sync.client import connect

# As for HTTP bodies: twice the bound that docs/operate/secure.md names.
_BUSY_S = 0.1


@pytest.mark.parametrize("hostile", SOCKETS, ids=lambda hostile: hostile.name)
def test_a_hostile_socket_ends_as_it_should_and_does_not_hold_the_loop(router: Victim, hostile: HostileSocket) -> None:
    row = socket_row(router, hostile, tries=1)
    if row.lags[0].busy_s >= _BUSY_S:
        row = socket_row(router, hostile, tries=2)
    assert row.answer == (str(hostile.close_code) if hostile.close_code else "open")
    assert min(lag.busy_s for lag in row.lags) < _BUSY_S


def opened(router: Victim) -> socket.socket:
    one = socket.create_connection(("127.0.0.1", router.ports["http_port"]), timeout=60)
    one.sendall(HANDSHAKE)
    assert b" 101 " in one.recv(4096)
    return one


def answers(router: Victim) -> bool:
    """Somebody else's stream on another socket is complete."""
    with connect(f"ws://127.0.0.1:{router.ports['http_port']}/v1/ws", subprotocols=["ryzanstein.v1"], proxy=None) as one:  # type: ignore[list-item]
        body = {"messages": [{"role": "user", "content": "0.001"}], "max_tokens": 20}
        one.send(json.dumps({"type": "submit", "id": "a", "url": "/v1/chat/completions", "body": body}))
        kinds = []
        while not kinds or kinds[-1] not in ("done", "error"):
            kinds.append(json.loads(one.recv(timeout=30))["type"])
    return kinds[-1] == "done"


def test_sockets_that_nobody_reads_slow_nobody_else(router: Victim) -> None:
    asked = message(
        type="submit",
        id="a",
        url="/v1/chat/completions",
        body={"messages": [{"role": "user", "content": "0.001"}], "max_tokens": 1000, "logprobs": True, "top_logprobs": 5},
    )
    with contextlib.ExitStack() as stack:
        for _ in range(20):
            stack.enter_context(opened(router)).sendall(asked)
        assert answers(router)


def test_half_open_and_broken_sockets_leave_nothing(router: Victim) -> None:
    for hostile in SOCKETS[:12]:
        attack(router, hostile.content)
    memory, descriptors = router.resident_bytes, router.num_descriptors
    for _ in range(100):
        opened(router).close()
    for hostile in SOCKETS[:12]:
        attack(router, hostile.content[:200_000])
    end = time.monotonic() + 20
    while router.metric("ryzanstein_router_websockets_open") and time.monotonic() < end:
        time.sleep(0.1)
    assert router.metric("ryzanstein_router_websockets_open") == 0
    assert router.num_descriptors <= descriptors + 2
    assert router.resident_bytes - memory < 64 * 2**20
    assert router.errors == []
    assert answers(router)
