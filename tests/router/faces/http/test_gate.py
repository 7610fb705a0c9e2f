"""What every request passes: ids, bounds, the log line, the metric; and the probes."""

from __future__ import annotations

import asyncio
import time

import pytest
import structlog

from ryzanstein.router.faces.http.gate import HttpLimits


@pytest.fixture
def logged():
    with structlog.testing.capture_logs(processors=[structlog.contextvars.merge_contextvars]) as entries:
        yield entries


async def test_every_response_has_a_request_id_and_keeps_the_clients_own(http, chat, face):
    made = await http.post("/v1/chat/completions", json=chat())
    kept = await http.post("/v1/chat/completions", json=chat(), headers={"X-Request-Id": "mine-1"})
    assert (len(made.headers["x-request-id"]), kept.headers["x-request-id"]) == (32, "mine-1")
    assert face.core.requests[1].request_id == "mine-1"
    assert (await http.get("/nowhere")).headers["x-request-id"]


@pytest.mark.parametrize("bad", ["x" * 129, "a b", "\u00e4"])
async def test_an_id_that_is_no_token_is_replaced(http, bad):
    response = await http.get("/healthz", headers={"X-Request-Id": bad.encode("latin-1")})
    assert len(response.headers["x-request-id"]) == 32


async def test_the_node_that_answered_last_is_named(http, chat):
    assert (await http.post("/v1/chat/completions", json=chat())).headers["x-ryzanstein-node"] == "node-1"


async def test_the_trace_context_and_the_deadline_go_on_with_the_request(http, chat, face):
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    headers = {"traceparent": trace, "X-Request-Timeout-Ms": "5000"}
    await http.post("/v1/chat/completions", json=chat(), headers=headers)
    await http.post("/v1/chat/completions", json=chat(), headers={"traceparent": "nonsense"})
    first, second = face.core.requests
    assert (first.traceparent, second.traceparent) == (trace, "")
    assert 0 < first.deadline - time.time() <= 5
    assert second.deadline is None


async def test_each_request_is_one_log_line_and_probes_are_none(http, chat, logged, eventually):
    await http.get("/healthz")
    await http.post("/v1/chat/completions", json=chat(), headers={"X-Request-Id": "r1"})
    await http.post("/v1/chat/completions", json={}, headers={"X-Request-Id": "r2"})
    lines = []

    def both_ended():
        lines[:] = [entry for entry in logged if entry["event"] == "http request"]
        return len(lines) >= 2

    await eventually(both_ended, "two lines")
    assert [(line["method"], line["path"], line["code"], line["request_id"]) for line in lines] == [
        ("POST", "/v1/chat/completions", 200, "r1"),
        ("POST", "/v1/chat/completions", 400, "r2"),
    ]
    assert all(line["duration_s"] > 0 for line in lines)


async def test_requests_are_counted_by_route_and_code_not_by_path(http, face, eventually):
    await http.get("/v1/models/a")
    await http.get("/v1/models/b")
    await http.get("/nowhere")
    await http.get("/elsewhere")
    await eventually(lambda: face.requests_with(404, "unknown") == 2, "both unknown paths in one series")
    assert face.requests_with(404, "/v1/models/{name:path}") == 2


async def test_probes(http, face):
    assert (await http.get("/healthz")).json() == {"status": "ok"}
    assert (await http.get("/readyz")).status_code == 200
    face.core.served = []
    unready = await http.get("/readyz")
    assert (unready.status_code, unready.json()["error"]["code"]) == (503, "no_nodes")
    assert (await http.get("/healthz")).status_code == 200
    assert (await http.get("/v1/models")).json() == {"object": "list", "data": []}


async def chunks(count, size=1024):
    for _ in range(count):
        yield b"x" * size


class TestBounds:
    @pytest.fixture
    def limits(self):
        return HttpLimits(max_body_bytes=4096, max_requests=2)

    async def test_a_body_over_the_bound_is_refused_with_and_without_its_length(self, http, face, chat, eventually):
        for content in (b"x" * 4097, chunks(5)):
            response = await http.post("/v1/chat/completions", content=content, headers={"Content-Type": "application/json"})
            assert (response.status_code, "4096 bytes" in response.json()["error"]["message"]) == (413, True)
        assert (await http.post("/v1/chat/completions", json=chat())).status_code == 200
        await eventually(lambda: face.requests_with(413) == 2, "both counted")

    async def test_a_body_of_just_the_bound_is_read(self, http, chat):
        text = "x" * (4096 - len('{"model":"echo","messages":[{"role":"user","content":""}]}'))
        response = await http.post("/v1/chat/completions", json=chat(text))
        assert len(response.request.content) == 4096
        assert response.json()["choices"][0]["message"]["content"] == text

    async def test_requests_over_the_bound_are_reported_to_come_back(self, http, face, chat, eventually):
        face.core.pause_at = 0
        running = [asyncio.create_task(http.post("/v1/chat/completions", json=chat())) for _ in range(2)]
        await eventually(lambda: face.core.readers == 2, "two requests run")
        refused = await http.post("/v1/chat/completions", json=chat())
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        face.core.resume.set()
        assert [response.status_code for response in await asyncio.gather(*running)] == [200, 200]
        assert (await http.post("/v1/chat/completions", json=chat())).status_code == 200
