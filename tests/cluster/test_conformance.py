"""Every face gives the same answers, the same errors and the same rules: one suite, one cluster, four clients.

What gRPC says is what the others are compared with.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
import shutil
import socket
import struct
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
from tests.cluster.conformance.asked import Asked, Driver, Refusal, Reply
from tests.cluster.conformance.grpc_driver import GrpcDriver
from tests.cluster.conformance.http_driver import HttpDriver, SseDriver
from tests.cluster.conformance.websocket_driver import SocketDriver

from ryzanstein.cli.processes.cluster import ClusterSpec, LocalCluster
from ryzanstein.demo import MODEL_DIR
from ryzanstein.errors import Code
from ryzanstein.v1 import inference_pb2 as pb

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "build" / "websocket.md").read_text()
EXAMPLES = re.findall(r"^```(python|js)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
FACES = ("grpc", "http", "sse", "websocket")
STREAMS = ("grpc", "sse", "websocket")
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 24}
SAMPLED: dict[str, Any] = {
    "temperature": 0.9,
    "top_p": 0.95,
    "top_k": 40,
    "seed": 2026,
    "repetition_penalty": 1.05,
    "presence_penalty": 0.3,
    "frequency_penalty": 0.2,
    "min_tokens": 5,
    "max_tokens": 24,
}
SCHEMA = {
    "type": "object",
    "properties": {"found": {"type": "boolean"}, "count": {"enum": [1, 2, 3]}},
    "required": ["found", "count"],
    "additionalProperties": False,
}
ANSWERS = {
    "greedy": Asked(sampling=GREEDY),
    "sampled": Asked(sampling=SAMPLED),
    "min-p": Asked(sampling={"temperature": 1.0, "min_p": 0.2, "seed": 7, "max_tokens": 16}),
    "largest-seed": Asked(sampling={**SAMPLED, "seed": 2**64 - 1}),
    "three-choices": Asked(sampling={**SAMPLED, "n": 3, "logprobs": 2}),
    "log-probabilities": Asked(sampling={**GREEDY, "logprobs": 3}),
    "no-alternatives": Asked(sampling={**GREEDY, "logprobs": 0}),
    "stop-string": Asked(sampling={"temperature": 0.0, "max_tokens": 60, "stop": ("8 9", "8, 9")}),
    "one-token": Asked(sampling={"temperature": 0.0, "max_tokens": 1}),
    "beyond-its-end": Asked(sampling={"temperature": 0.0, "max_tokens": 80, "ignore_eos": True}),
    "a-bias": Asked(sampling={**GREEDY, "logit_bias": {40: 5.0, 41: -100.0}}),
    "a-schema": Asked(schema=SCHEMA, sampling={"temperature": 0.8, "seed": 3, "max_tokens": 100, "n": 2}),
    "a-call": Asked(tool={"name": "look_up", "parameters": SCHEMA}, sampling={"temperature": 0.0, "max_tokens": 100}),
    "a-completion": Asked(prompt="One two three", sampling={**GREEDY, "logprobs": 2}),
    "token-ids": Asked(prompt=(5, 17, 90, 8), sampling=GREEDY),
}
ERRORS = {
    "a-schema-that-cannot-be-kept": Asked(schema={"type": "object", "properties": {"a": {"type": "nonsense"}}}),
    "a-call-without-a-name": Asked(tool={"name": "", "parameters": {}}),
    "temperature": Asked(sampling={"temperature": 2.5}),
    "top_p": Asked(sampling={"top_p": 0.0}),
    "min_p": Asked(sampling={"min_p": -0.5}),
    "n": Asked(sampling={"n": 99}),
    "max_tokens": Asked(sampling={"max_tokens": 0}),
    "min_tokens": Asked(sampling={"min_tokens": 9, "max_tokens": 8}),
    "penalty": Asked(sampling={"presence_penalty": 9.0}),
    "an-empty-stop-string": Asked(sampling={"stop": ("",)}),
    "a-bias-too-large": Asked(sampling={"logit_bias": {1: 500.0}}),
    "no-messages": Asked(text=""),
    "an-unknown-model": Asked(model="nope"),
    "a-long-session-id": Asked(session_id="s" * 200),
    "a-long-user": Asked(user="u" * 17_000),
    "a-long-tenant": Asked(tenant="t" * 200),
    "context-by-max-tokens": Asked(sampling={"max_tokens": 1_000_000}),
    "context-by-prompt": Asked(text="zq " * 5000),
    "a-token-beyond-the-vocabulary": Asked(prompt=(5, 1_000_000)),
    "a-key-too-long": Asked(key="k" * 300),
    "characters": Asked(text="x" * 1_000_001),
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(ClusterSpec(MODEL_DIR, num_nodes=2, num_routers=2, tp=1)) as started:
        yield started


def driver_of(face: str, cluster: LocalCluster, router: str = "router-0") -> Any:
    url = cluster.http_url_of(router)
    match face:
        case "grpc":
            return GrpcDriver(cluster.services[router].grpc_address)
        case "http":
            return HttpDriver(url)
        case "sse":
            return SseDriver(url)
    return SocketDriver(url)


@pytest.fixture(scope="module")
def drivers(cluster: LocalCluster) -> Iterator[dict[str, Driver]]:
    made = {face: driver_of(face, cluster) for face in FACES}
    yield made
    for driver in made.values():
        driver.close()


@pytest.fixture(scope="module")
def undisturbed(drivers: dict[str, Driver]) -> Any:
    """What gRPC answers, asked once."""
    return functools.cache(lambda name: drivers["grpc"].ask(ANSWERS[name]))


def assert_same(reply: Reply, expected: Reply) -> None:
    assert reply.choices.keys() == expected.choices.keys()
    for choice, heard in expected.choices.items():
        assert reply.choices[choice].text == heard.text
        assert reply.choices[choice].reason == heard.reason
        assert reply.choices[choice].calls == heard.calls
        ours, theirs = reply.choices[choice].rows, heard.rows
        assert [(token, top) for token, _, top in ours] == [(token, top) for token, _, top in theirs]
        assert [value for _, value, _ in ours] == pytest.approx([value for _, value, _ in theirs], abs=1e-3)
    assert (reply.prompt_tokens, reply.completion_tokens) == (expected.prompt_tokens, expected.completion_tokens)


@pytest.mark.parametrize("name", ANSWERS)
@pytest.mark.parametrize("face", FACES[1:])
@pytest.mark.long
def test_the_answer_is_the_same(drivers: dict[str, Driver], undisturbed: Any, face: str, name: str) -> None:
    assert_same(drivers[face].ask(ANSWERS[name]), undisturbed(name))


def test_a_schema_and_a_call_are_kept(undisturbed: Any) -> None:
    """By gRPC, with which the others are compared. What max_tokens cut is not complete."""
    formed = undisturbed("a-schema").choices.values()
    texts = [heard.text for heard in formed if heard.reason == "stop"]
    called = undisturbed("a-call").choices[0]
    assert called.calls[0][0] == "look_up"
    texts += [arguments for _, arguments in called.calls if called.reason == "tool_calls"]
    assert texts
    for text in texts:
        jsonschema.validate(json.loads(text), SCHEMA)


def refusal_of(driver: Driver, asked: Asked) -> Refusal:
    with pytest.raises(Refusal) as caught:
        driver.ask(asked)
    return caught.value


@pytest.mark.parametrize("name", ERRORS)
@pytest.mark.parametrize("face", FACES[1:])
def test_the_error_is_the_same(drivers: dict[str, Driver], face: str, name: str) -> None:
    expected, refused = refusal_of(drivers["grpc"], ERRORS[name]), refusal_of(drivers[face], ERRORS[name])
    assert refused.compared == expected.compared, (refused.message, expected.message)


@pytest.mark.parametrize("face", FACES)
def test_a_request_ends_at_its_deadline(drivers: dict[str, Driver], face: str) -> None:
    asked = Asked(sampling={"temperature": 0.0, "max_tokens": 1200, "ignore_eos": True}, timeout_ms=150)
    assert refusal_of(drivers[face], asked).code is Code.DEADLINE_EXCEEDED


@pytest.mark.parametrize("face", FACES)
def test_a_session_remembers_what_was_said(drivers: dict[str, Driver], face: str) -> None:
    session = uuid.uuid4().hex
    first = drivers[face].ask(Asked("My name is Tavik.", session_id=session, sampling=GREEDY))
    second = drivers[face].ask(Asked("What is my name?", session_id=session, sampling=GREEDY))
    assert "Tavik" in second.choices[0].text
    assert second.prompt_tokens > first.prompt_tokens + first.completion_tokens


@pytest.mark.parametrize("face", FACES)
def test_a_session_goes_on_over_another_face(drivers: dict[str, Driver], face: str) -> None:
    session = uuid.uuid4().hex
    drivers["grpc"].ask(Asked("My name is Tavik.", session_id=session, sampling=GREEDY))
    assert "Tavik" in drivers[face].ask(Asked("What is my name?", session_id=session, sampling=GREEDY)).choices[0].text


@pytest.mark.parametrize("face", FACES)
def test_a_request_with_a_key_runs_once_whatever_face_repeats_it(drivers: dict[str, Driver], face: str) -> None:
    asked = Asked(sampling=SAMPLED, key=uuid.uuid4().hex)
    first = drivers[face].ask(asked)
    for other in ("grpc", face):
        again = drivers[other].ask(asked)
        assert again.generation == first.generation
        assert again.choices[0].text == first.choices[0].text
    refused = refusal_of(drivers[face], replace(asked, text="Something else."))
    assert (refused.code, refused.reason) == (Code.FAILED_PRECONDITION, "IDEMPOTENCY_MISMATCH")


@pytest.mark.parametrize("face", STREAMS)
@pytest.mark.parametrize("name", ["three-choices", "stop-string", "beyond-its-end", "a-schema", "a-call"])
@pytest.mark.long
def test_a_client_that_comes_back_gets_the_rest_once(
    drivers: dict[str, Driver], undisturbed: Any, face: str, name: str
) -> None:
    reply = drivers[face].begin(ANSWERS[name], 7)
    assert_same(drivers[face].attach(reply), undisturbed(name))


@pytest.mark.parametrize("face", STREAMS)
def test_a_generation_that_nobody_knows_is_not_found(drivers: dict[str, Driver], face: str) -> None:
    driver: Any = drivers[face]
    lost = uuid.uuid4().hex
    if face != "grpc":
        driver._ids[lost] = f"chatcmpl-{lost}" if face == "websocket" else (f"chatcmpl-{lost}", "")
    with pytest.raises(Refusal) as caught:
        driver.attach(Reply(lost))
    assert (caught.value.code, caught.value.reason) == (Code.NOT_FOUND, "GENERATION_NOT_FOUND")


@pytest.mark.parametrize("face", STREAMS)
def test_a_cancelled_generation_ends_as_such(drivers: dict[str, Driver], face: str) -> None:
    asked = Asked(sampling={"temperature": 0.0, "max_tokens": 400, "ignore_eos": True, "n": 2})
    reply = drivers[face].cancelled(asked, 6)
    assert {heard.reason for heard in reply.choices.values()} == {"cancelled"}
    assert 6 <= reply.completion_tokens < 800


@pytest.mark.parametrize("face", STREAMS)
def test_a_generation_may_end_with_its_client(drivers: dict[str, Driver], face: str) -> None:
    sampling = {"temperature": 0.0, "max_tokens": 1200, "ignore_eos": True}
    reply = drivers[face].begin(Asked(sampling=sampling, cancel_on_disconnect=True), 3)
    time.sleep(0.3)  # whoever attaches before the end of the connection is seen keeps it alive
    drivers[face].attach(reply)
    assert reply.choices[0].reason == "cancelled"
    assert reply.completion_tokens < 1200


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_an_example_of_the_page_runs(cluster: LocalCluster, number: int) -> None:
    kind, program = EXAMPLES[number]
    here = program.replace("ws://127.0.0.1:8000", cluster.http_url.replace("http", "ws", 1))
    node = [str(shutil.which("node")), "--experimental-websocket", "--no-warnings", "-e"]
    command = [sys.executable, "-c"] if kind == "python" else node
    done = subprocess.run([*command, here], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert re.search(r"7\D+8\D+9", done.stdout)


@contextlib.contextmanager
def envoy(cluster: LocalCluster, folder: Path) -> Iterator[str]:
    """The URL of Envoy, as docs/build/envoy-grpc-web.yaml has it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    host, router_port = cluster.router_address.rsplit(":", 1)
    page = (ROOT / "docs" / "build" / "envoy-grpc-web.yaml").read_text()
    config = folder / "envoy.yaml"
    config.write_text(
        page.replace("127.0.0.1, port_value: 50051", f"{host}, port_value: {router_port}").replace("8080", str(port))
    )
    command = [Path(sys.executable).with_name("envoy"), "-c", config, "--disable-hot-restart", "--log-level", "error"]
    with subprocess.Popen([*map(str, command), "--concurrency", "1"]) as process:
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()


def test_envoy_speaks_grpc_web_for_a_router(cluster: LocalCluster, undisturbed: Any, tmp_path: Path) -> None:
    """A call as a browser's stub makes it: messages in frames of five bytes and a body, the trailers in the last."""
    asked = ANSWERS["greedy"]
    chat = pb.ChatRequest(
        messages=[pb.Message(role=pb.ROLE_USER, content=asked.text)], sampling=pb.SamplingParams(**asked.sampling)
    )
    message = pb.StreamChatRequest(chat=chat).SerializeToString()
    headers = {"Content-Type": "application/grpc-web+proto", "X-Grpc-Web": "1", "Origin": "https://chat.example"}
    with envoy(cluster, tmp_path) as url, httpx.Client(transport=httpx.HTTPTransport(retries=8), timeout=60) as http:
        path = f"{url}/ryzanstein.v1.InferenceService/StreamChat"
        answer = http.post(path, content=b"\0" + struct.pack("!I", len(message)) + message, headers=headers)
    assert answer.headers["access-control-allow-origin"] == "https://chat.example"
    text, rest, trailers = "", answer.content, b""
    while rest:
        (size,) = struct.unpack("!I", rest[1:5])
        data, is_end, rest = rest[5 : 5 + size], rest[0] & 0x80, rest[5 + size :]
        if is_end:
            trailers = data
        else:
            text += pb.StreamChatResponse.FromString(data).event.delta.text
    assert b"grpc-status:0" in trailers.replace(b" ", b"")
    assert text == undisturbed("greedy").choices[0].text


@pytest.mark.timeout(180)
def test_a_socket_goes_on_at_another_router_when_its_own_is_killed(cluster: LocalCluster) -> None:
    """The last test here. Many generations are on the socket; each goes on at its index, and every index comes once."""
    params = {**SAMPLED, "max_tokens": 90, "ignore_eos": True, "logprobs": 1, "n": 2}
    asked = {seed: Asked("Count from 1 to 60.", sampling={**params, "seed": seed}) for seed in range(3)}
    with closing(driver_of("websocket", cluster)) as first, closing(driver_of("websocket", cluster, "router-1")) as second:
        expected = {seed: second.ask(each) for seed, each in asked.items()}
        begun = {seed: first.begin_alongside(each, 20) for seed, each in asked.items()}
        cluster.kill("router-0")
        with pytest.raises(ConnectionError):
            first.read_on()
        for seed, reply in begun.items():
            assert 0 < reply.num_read < 180
            second.know(reply, first)
            assert_same(second.attach(reply), expected[seed])
