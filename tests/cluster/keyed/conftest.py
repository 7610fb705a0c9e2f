"""A cluster whose router asks for keys, with tenants that have limits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from ryzanstein.auth.caller import DEFAULT_SCOPES, Scope
from ryzanstein.auth.key_form import ApiKey
from ryzanstein.auth.keys.keys_text import key_text, revoked_text
from ryzanstein.auth.keys.records import KeyRecord
from ryzanstein.cli.processes.cluster import ClusterSpec, LocalCluster
from ryzanstein.demo import MODEL_DIR

ORIGIN = "https://chat.example"
LIMITS = """
[tenant.acme]
requests_per_second = 1000
tokens_per_minute = 1_000_000
[tenant.patient]
requests_per_second = 2
burst = 1
[tenant.poor]
tokens_per_month = 1
"""
SLOW = """
[tenant.slow-{}]
requests_per_second = 0.01
burst = 1
"""
SCOPES = {"reader": frozenset({Scope.SESSIONS}), "operator": frozenset({Scope.INFER, Scope.ADAPTERS})}
CLIENTS = ("openai", "node", "langchain", "grpc", "grpc-js", "page", "web")


@dataclass(frozen=True)
class KeyedCluster:
    """A cluster, and a key of each kind by name. `stranger` is known to nobody."""

    cluster: LocalCluster
    keys: Mapping[str, str] = field(repr=False)

    @property
    def url(self) -> str:
        return f"{self.cluster.http_url}/v1"

    def metadata(self, name: str) -> tuple[tuple[str, str], ...]:
        return (("authorization", f"Bearer {self.keys[name]}"),)

    def headers(self, name: str) -> dict[str, str]:
        return dict(self.metadata(name))


def write_keys(folder: Path, tenants: str, keys: Mapping[str, tuple[ApiKey, str, frozenset[Scope]]]) -> Path:
    """Writes a keys file of tables of tenants, and of keys with their tenant and scopes."""
    path = folder / "keys.toml"
    path.touch(0o600)
    records = (KeyRecord(key.key_id, key.digest(), tenant, scopes) for key, tenant, scopes in keys.values())
    path.write_text(tenants + "".join(map(key_text, records)))
    return path


@pytest.fixture(scope="package")
def keyed_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KeyedCluster]:
    keys_file = tmp_path_factory.mktemp("keys") / "keys.toml"
    keys_file.touch(0o600)
    keys = {"stranger": ApiKey.new().reveal()}
    text = LIMITS + "".join(SLOW.format(client) for client in CLIENTS)
    tenants = {
        "acme": "acme",
        "globex": "globex",
        "reader": "acme",
        "revoked": "acme",
        "patient": "patient",
        "poor": "poor",
        "operator": "acme",
    }
    for name, tenant in {**tenants, **{f"slow-{client}": f"slow-{client}" for client in CLIENTS}}.items():
        key = ApiKey.new()
        keys[name] = key.reveal()
        scopes = SCOPES.get(name, DEFAULT_SCOPES)
        text += key_text(KeyRecord(key.key_id, key.digest(), tenant, scopes))
        text += revoked_text(key.key_id, 1.0) if name == "revoked" else ""
    keys_file.write_text(text)
    flags = ("--keys-file", str(keys_file), "--http-cors-origins", ORIGIN, "--adapter-routes")
    with LocalCluster(ClusterSpec(MODEL_DIR, num_nodes=1, tp=1, router_flags=flags, api_key=keys["acme"])) as cluster:
        yield KeyedCluster(cluster, keys)
