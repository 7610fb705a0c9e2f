"""A client that is not Python and has no stubs: `buf curl` speaks through reflection, as grpcurl does."""

from __future__ import annotations

import json
import shutil
import subprocess
from typing import Any

import pytest

BUF = ["npx", "--yes", "--package", "@bufbuild/buf@1.75.0", "buf", "curl", "--protocol", "grpc", "--http2-prior-knowledge"]


def buf_curl(*arguments: str) -> str:
    assert shutil.which("npx"), "npx (Node.js) is needed to test with a foreign client"
    done = subprocess.run([*BUF, *arguments], capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def url(calm: Any) -> str:
    return f"http://{calm.cluster.router_address}"


def test_reflection_lists_the_services(url: str) -> None:
    listed = buf_curl("--list-services", url).split()
    assert {"ryzanstein.v1.InferenceService", "ryzanstein.v1.SessionService", "grpc.health.v1.Health"} <= set(listed)


def test_health_is_serving(url: str) -> None:
    reply = json.loads(buf_curl("-d", '{"service": "readiness"}', f"{url}/grpc.health.v1.Health/Check"))
    assert reply == {"status": "SERVING"}


def test_a_person_can_hold_a_conversation(url: str) -> None:
    def say(text: str) -> str:
        request = {
            "messages": [{"role": "ROLE_USER", "content": text}],
            "sessionId": "by-hand",
            "sampling": {"temperature": 0},
        }
        reply = buf_curl("-d", json.dumps(request), f"{url}/ryzanstein.v1.InferenceService/Chat")
        return str(json.loads(reply)["choices"][0]["text"])

    say("My name is Tavik.")
    assert "Tavik" in say("What is my name?")
