"""Clients of others with keys, each in its own environment: Node's openai and grpc-js, langchain, buf curl, and Envoy between.

`bash .ci/parts clients` installs those of Node.js and langchain.
"""

from __future__ import annotations

import base64
import json
import shutil
import struct
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest
from google.rpc import error_details_pb2 as details
from google.rpc import status_pb2
from tests.cluster.keyed.conftest import ORIGIN, KeyedCluster
from tests.cluster.test_conformance import envoy
from tests.cluster.test_foreign_clients import BUF

from ryzanstein.v1 import inference_pb2 as pb

pytestmark = [pytest.mark.lab, pytest.mark.timeout(180)]

ROOT = Path(__file__).parents[3]
PROGRAMS = Path(__file__).parent / "programs"
NODE = ROOT / "build/clients/node/node_modules"


def reported(command: list[str], folder: Path = PROGRAMS) -> list[dict[str, Any]]:
    """Runs a client, and returns what it reported of each key."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture
def node_folder(tmp_path: Path) -> Path:
    """The programs for Node.js beside their packages, where it looks for them."""
    assert (NODE / "@grpc").exists(), "npm packages are missing: `bash .ci/parts clients` installs them"
    for program in PROGRAMS.glob("*.mjs"):
        shutil.copy(program, tmp_path)
    (tmp_path / "node_modules").symlink_to(NODE)
    return tmp_path


def test_openai_for_node(keyed_cluster: KeyedCluster, node_folder: Path) -> None:
    names = [("acme", False, 0), ("acme", True, 0), ("stranger", True, 2), ("revoked", False, 2), ("reader", False, 2)]
    names += [("slow-node", False, 0), ("slow-node", False, 0), ("poor", False, 2), ("patient", True, 0), ("patient", True, 2)]
    asked = json.dumps([(name, keyed_cluster.keys[name], *more) for name, *more in names])
    seen = reported(["node", "openai_keys.mjs", keyed_cluster.url, asked], node_folder)
    assert seen[0]["text"] == seen[1]["text"] != ""
    refused = [(each["error"], each["status"], each["code"], each["requests"]) for each in seen if "error" in each]
    assert refused == [
        ("AuthenticationError", 401, "invalid_api_key", 1),
        ("AuthenticationError", 401, "key_revoked", 1),
        ("PermissionDeniedError", 403, "scope_missing", 1),
        ("RateLimitError", 429, "rate_limit_exceeded", 1),
        ("RateLimitError", 429, "insufficient_quota", 1),
    ]
    assert 90_000 < int(seen[6]["retry"]) <= 100_000
    assert (seen[9]["requests"], seen[9]["text"]) == (2, seen[0]["text"]), "it came back when it was told to"


def test_grpc_for_node(keyed_cluster: KeyedCluster, node_folder: Path) -> None:
    names = [("acme", False), ("acme", True), ("stranger", False), ("stranger", True), ("revoked", False), ("reader", True)]
    names += [("slow-grpc-js", False), ("slow-grpc-js", False), ("slow-grpc-js", True)]
    asked = json.dumps([("nobody", "", False), *((name, keyed_cluster.keys[name], stream) for name, stream in names)])
    command = ["node", "grpc_keys.mjs", keyed_cluster.cluster.router_address, str(ROOT / "protos"), asked]
    seen = reported(command, node_folder)
    assert seen[1]["text"] == seen[2]["text"] != ""
    assert len(seen[1]["limits"]) == len(seen[2]["limits"]) == 6
    refusals = [(each["code"], *_reason(each["details"])) for each in seen if each["code"]]
    assert refusals[:5] == [
        (16, "KEY_MISSING", None, ""),
        (16, "KEY_INVALID", None, ""),
        (16, "KEY_INVALID", None, ""),
        (16, "KEY_REVOKED", None, ""),
        (7, "SCOPE_MISSING", None, ""),
    ]
    for code, reason, retry_s, quota in refusals[5:]:
        assert (code, reason, quota) == (8, "RATE_LIMITED", "requests_per_second")
        assert retry_s is not None
        assert 90 < retry_s <= 100
    assert len(refusals) == 7
    assert len(seen[-1]["limits"]) == 3, "limits are shown with a refusal too"


def _reason(packed: str) -> tuple[str, float | None, str]:
    """Returns the reason, the time to wait and the quota of a status's details."""
    reason, retry_s, quota = "", None, ""
    for each in status_pb2.Status.FromString(base64.b64decode(packed)).details:
        info, retry, failure = details.ErrorInfo(), details.RetryInfo(), details.QuotaFailure()
        if each.Unpack(info):
            reason = info.reason
        elif each.Unpack(retry):
            retry_s = retry.retry_delay.ToTimedelta().total_seconds()
        elif each.Unpack(failure):
            quota = failure.violations[0].quota_metric
    return reason, retry_s, quota


def test_langchain(keyed_cluster: KeyedCluster) -> None:
    python = ROOT / "build/clients/python/bin/python"
    assert python.exists(), f"{python} is missing: `bash .ci/parts clients` installs it"
    names = [("acme", False), ("acme", True), ("stranger", True), ("reader", False)]
    names += [("slow-langchain", False), ("slow-langchain", True)]
    asked = json.dumps([(name, keyed_cluster.keys[name], stream) for name, stream in names])
    seen = reported([str(python), "langchain_keys.py", keyed_cluster.url, asked])
    assert seen[0]["text"] == seen[1]["text"] != ""
    assert [each["error"] for each in seen if "error" in each] == [
        "AuthenticationError",
        "PermissionDeniedError",
        "RateLimitError",
    ]
    assert 90_000 < int(seen[5]["retry"]) <= 100_000


def test_buf_curl_finds_services_and_calls_them_with_a_key_alone(keyed_cluster: KeyedCluster) -> None:
    url = f"http://{keyed_cluster.cluster.router_address}"
    chat = ["-d", '{"messages": [{"role": "ROLE_USER", "content": "hello"}]}', f"{url}/ryzanstein.v1.InferenceService/Chat"]

    def call(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*BUF, *arguments], capture_output=True, text=True, timeout=110, check=False)

    key = f"Authorization: Bearer {keyed_cluster.keys['acme']}"
    assert "ryzanstein.v1.InferenceService" in call("--reflect-header", key, "--list-services", url).stdout
    assert call("--list-services", url).returncode != 0
    assert json.loads(call("--reflect-header", key, "-H", key, *chat).stdout)["choices"]
    assert "unauthenticated" in call("--reflect-header", key, *chat).stderr


def test_envoy_passes_the_key_of_a_page_on(keyed_cluster: KeyedCluster, tmp_path: Path) -> None:
    message = pb.ChatRequest(messages=[pb.Message(role=pb.ROLE_USER, content="hello")]).SerializeToString()
    framed = b"\0" + struct.pack("!I", len(message)) + message
    headers = {"Content-Type": "application/grpc-web+proto", "X-Grpc-Web": "1", "Origin": ORIGIN}
    asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type,x-grpc-web"}
    with envoy(keyed_cluster.cluster, tmp_path) as url, httpx.Client(transport=httpx.HTTPTransport(retries=8)) as http:
        path = f"{url}/ryzanstein.v1.InferenceService/Chat"
        preflight = http.options(path, headers={"Origin": ORIGIN, **asks})
        answers = [
            http.post(path, content=framed, headers={**headers, **keyed_cluster.headers(name)}) for name in ("acme", "reader")
        ]
        nobody = http.post(path, content=framed, headers=headers)
        limited = [http.post(path, content=framed, headers={**headers, **keyed_cluster.headers("slow-web")}) for _ in "12"][1]
    assert "authorization" in preflight.headers["access-control-allow-headers"]
    assert b"grpc-status:0" in answers[0].content.replace(b" ", b"")
    assert [each.headers["grpc-status"] for each in (answers[1], nobody)] == ["7", "16"]
    assert (limited.headers["grpc-status"], limited.headers["x-ratelimit-remaining-requests"]) == ("8", "0")
    assert "x-ratelimit-remaining-requests" in limited.headers["access-control-expose-headers"]
    assert all(each.headers["access-control-allow-origin"] == ORIGIN for each in (*answers, nobody))
