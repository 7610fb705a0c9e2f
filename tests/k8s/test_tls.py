"""TLS between services on Kubernetes: the certificates that a pod gets are the ones that its service takes."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from ryzanstein.auth.peers.authority import Authority
from ryzanstein.auth.peers.material import MaterialError, read_material
from ryzanstein.auth.peers.peer import DEFAULT_TRUST, Peer, PeerRole
from ryzanstein.orchestrator.config import OrchestratorSettings
from ryzanstein.router.config import RouterSettings
from ryzanstein.worker.config import WorkerSettings

Document = dict[str, Any]
Overlay = Callable[..., list[Document]]
SETTINGS = {"router": RouterSettings, "orchestrator": OrchestratorSettings, "worker": WorkerSettings}
ADDRESSED = {"router": 50053, "orchestrator": 50055, "worker": 50065}
POD = {"router": "router-7d9c8b6f5-x2x4z", "orchestrator": "orchestrator-5f7-abcde", "worker": "worker-1"}
CSI = "csi.cert-manager.io/"
FOREIGN = {"PodMonitor", "Issuer"}


def pods(manifests: list[Document]) -> dict[str, Document]:
    workloads = [each for each in manifests if each["kind"] in {"Deployment", "StatefulSet"}]
    return {each["metadata"]["name"]: each["spec"]["template"]["spec"] for each in workloads}


def container(manifests: list[Document], name: str) -> Document:
    (only,) = pods(manifests)[name]["containers"]
    return dict(only)


def settings_of(manifests: list[Document], name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A service's settings as its container gives them, in the pod of `POD`."""
    with monkeypatch.context() as patched:
        for variable in [each for each in os.environ if each.startswith("RYZANSTEIN_")]:
            patched.delenv(variable)
        for each in container(manifests, name)["env"]:
            given = each.get("value", "redis://redis" if each["name"].endswith("REDIS_URL") else POD[name])
            patched.setenv(each["name"], re.sub(r"\$\((\w+)\)", lambda found: os.environ[found.group(1)], given))
        return SETTINGS[name](_env_file=None)


def peer_of(settings: Any) -> Peer:
    """Whose certificate a service with these settings takes."""
    if isinstance(settings, WorkerSettings):
        return Peer(PeerRole.NODE, settings.node_id)
    return Peer(PeerRole.ROUTER, settings.router_id) if isinstance(settings, RouterSettings) else Peer(PeerRole.ORCHESTRATOR)


@pytest.mark.parametrize("name", sorted(SETTINGS))
def test_services_listen_and_dial_with_tls_alone(with_tls: list[Document], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings, pod = settings_of(with_tls, name, monkeypatch), container(with_tls, name)
    assert (settings.tls, settings.tls_port) == ("require", ADDRESSED[name])
    assert {port["name"]: port["containerPort"] for port in pod["ports"]}["tls"] == settings.tls_port
    assert settings.insecure is (name == "router"), "its ports for clients have no certificate"
    settings.check_exposure()
    if name != "orchestrator":
        exposed = [each for each in with_tls if each["kind"] == "Service" and each["metadata"]["name"] == "orchestrator"]
        assert settings.orchestrator in {f"orchestrator:{port['port']}" for port in exposed[0]["spec"]["ports"]}
        assert settings.orchestrator.endswith(f":{ADDRESSED['orchestrator']}")


@pytest.mark.parametrize("name", sorted(SETTINGS))
def test_the_certificates_are_a_folder_that_the_pod_may_not_write(
    with_tls: list[Document], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (mount,) = [each for each in container(with_tls, name)["volumeMounts"] if each["name"] == "tls"]
    (volume,) = [each for each in pods(with_tls)[name]["volumes"] if each["name"] == "tls"]
    assert mount["mountPath"] == str(settings_of(with_tls, name, monkeypatch).tls_dir)
    assert mount["readOnly"] is True
    assert volume.keys() - {"name"} <= {"csi", "secret", "projected"}


def test_a_node_drains_itself_at_the_port_that_it_has(with_tls: list[Document], monkeypatch: pytest.MonkeyPatch) -> None:
    command = container(with_tls, "worker")["lifecycle"]["preStop"]["exec"]["command"]
    assert command[command.index("--direct") + 1] == f"127.0.0.1:{settings_of(with_tls, 'worker', monkeypatch).tls_port}"
    assert "RYZANSTEIN_TLS_DIR" in {each["name"] for each in container(with_tls, "worker")["env"]}


@pytest.mark.parametrize("name", sorted(SETTINGS))
def test_what_the_csi_driver_is_asked_for_is_what_our_own_ca_issues(
    overlay: Overlay, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents = overlay("base", "tls")
    (volume,) = [each["csi"] for each in pods(documents)[name]["volumes"] if each["name"] == "tls"]
    asked = {
        key.removeprefix(CSI): value.replace("${POD_NAME}", POD[name]) for key, value in volume["volumeAttributes"].items()
    }
    peer = peer_of(settings_of(documents, name, monkeypatch))
    assert asked["uri-sans"] == peer.uri(DEFAULT_TRUST)
    assert asked["dns-names"].split(",") == peer.dns_names(DEFAULT_TRUST)
    assert {"server auth", "client auth", "digital signature"} <= set(asked["key-usages"].split(","))
    assert int(asked["fs-group"]) == pods(documents)[name]["securityContext"]["runAsGroup"]
    hours = [int(asked[key].removesuffix("h")) for key in ("renew-before", "duration")]
    assert hours[0] > hours[1] / 3, "the alert would fire at each renewal"
    assert volume["driver"] == "csi.cert-manager.io"
    assert volume["readOnly"] is True
    (issuer,) = [each for each in documents if each["kind"] == "Issuer"]
    assert issuer["metadata"]["name"] == asked["issuer-name"]


def mounted(volume: Document, secrets: dict[str, dict[str, bytes]], folder: Path) -> Path:
    """Writes a volume as kubelet does: one folder per state, and links to what is in it."""
    state = folder / f"..{time.time_ns()}"
    state.mkdir(parents=True)
    sources = [volume["secret"]] if "secret" in volume else [each["secret"] for each in volume["projected"]["sources"]]
    for source in sources:
        files = secrets[source.get("secretName") or source["name"]]
        for item in source.get("items", [{"key": key, "path": key} for key in files]):
            path = state / item["path"]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(files[item["key"]])
            path.chmod((volume.get("secret") or volume["projected"])["defaultMode"])
    (folder / "..data").symlink_to(state.name)
    for top in state.iterdir():
        (folder / top.name).symlink_to(f"..data/{top.name}")
    return folder


@pytest.mark.parametrize(
    ("name", "pod"), [("orchestrator", ""), ("router", ""), ("worker", "worker-0"), ("worker", "worker-1")]
)
def test_the_secrets_of_the_commands_are_mounted_as_the_certificate_of_each_pod(
    overlay: Overlay, name: str, pod: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents = overlay("base", "tls-secrets")
    monkeypatch.setitem(POD, "worker", pod)
    authority, secrets = Authority.new(DEFAULT_TRUST), {}
    issued = {"orchestrator": Peer(PeerRole.ORCHESTRATOR), "router": Peer(PeerRole.ROUTER, "routers")}
    issued |= {f"worker-{index}": Peer(PeerRole.NODE, f"worker-{index}") for index in range(2)}
    for secret, peer in issued.items():
        authority.write(peer, tmp_path / "ca" / secret)
        secrets[f"ryzanstein-tls-{secret}"] = {each.name: each.read_bytes() for each in (tmp_path / "ca" / secret).iterdir()}
    (mount,) = [each for each in container(documents, name)["volumeMounts"] if each["name"] == "tls"]
    (volume,) = [each for each in pods(documents)[name]["volumes"] if each["name"] == "tls"]
    folder = mounted(volume, secrets, tmp_path / "pod")
    seen = folder / mount["subPathExpr"].replace("$(RYZANSTEIN_NODE_ID)", pod) if name == "worker" else folder
    settings = settings_of(documents, name, monkeypatch)
    assert read_material(seen, settings.trust_domain, time.time()).peer == peer_of(settings)
    assert sorted(each.name for each in seen.iterdir() if not each.name.startswith("..")) == ["ca.crt", "tls.crt", "tls.key"]
    (seen / "tls.key").chmod(0o444)
    with pytest.raises(MaterialError, match="every user can read"):
        read_material(seen, settings.trust_domain, time.time())


@pytest.mark.parametrize("kind", ["tls", "tls-secrets"])
@pytest.mark.parametrize("name", sorted(SETTINGS))
def test_the_step_before_accepts_both_and_says_that_the_network_protects_it(
    overlay: Overlay, kind: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_of(overlay("base", kind, "tls-accept"), name, monkeypatch)
    assert (settings.tls, settings.insecure, settings.tls_port) == ("accept", True, ADDRESSED[name])
    settings.check_exposure()


COMBINED = [
    (),
    ("keys",),
    ("tls",),
    ("tls-secrets",),
    ("tls", "tls-accept"),
    ("keys", "tls", "tls-accept"),
    ("redis-sessions", "keys", "tls", "pod-monitor", "otlp-traces"),
    ("tls-secrets", "otlp-traces", "keys", "redis-sessions"),
    ("keys", "redis-sessions"),
]


@pytest.mark.parametrize("chosen", COMBINED, ids="+".join)
def test_no_container_is_without_protection_that_does_not_say_so(
    overlay: Overlay, chosen: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    documents = overlay("base", *chosen)
    for name in SETTINGS:
        settings = settings_of(documents, name, monkeypatch)
        settings.check_exposure()
        if name == "router" and "redis-sessions" in chosen:  # says it for its port for routers, whatever protects that
            assert settings.insecure or settings.protected
        else:
            assert settings.insecure is not settings.protected, "who is protected need not say insecure"
        assert all(port.get("name") for port in container(documents, name)["ports"])
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert container(documents, name)[probe]["grpc"]["port"] == settings.health_port


@pytest.mark.parametrize("chosen", COMBINED, ids="+".join)
def test_documents_are_valid_strictly_and_have_no_secret(overlay: Overlay, chosen: tuple[str, ...]) -> None:
    documents = overlay("base", *chosen)
    for document in documents:
        if document["kind"] not in FOREIGN:  # their schemas are of custom resources
            kubernetes_validate.validate(document, "1.32", strict=True)
    text = str(documents)
    assert "PRIVATE KEY" not in text
    assert "Secret" not in {each["kind"] for each in documents}


def test_the_policies_of_approval_allow_each_service_account_what_its_pods_ask_for_and_nothing_else(
    overlay: Overlay, k8s_dir: Path
) -> None:
    documents = overlay("base", "tls")
    approval = [each for each in yaml.safe_load_all((k8s_dir / "components/tls/approval.yaml").read_text()) if each]
    policies = {each["metadata"]["name"]: each["spec"] for each in approval if each["kind"] == "CertificateRequestPolicy"}
    for name, spec in pods(documents).items():
        (volume,) = [each["csi"] for each in spec["volumes"] if each["name"] == "tls"]
        asked = {key.removeprefix(CSI): value for key, value in volume["volumeAttributes"].items()}
        allowed = policies[f"ryzanstein-{name}"]["allowed"]
        pattern = asked["uri-sans"].replace("${POD_NAME}", "*")
        assert allowed["uris"] == {"required": True, "values": [pattern]}
        assert allowed["dnsNames"]["values"] == asked["dns-names"].replace("${POD_NAME}", "*").split(",")
        assert allowed["usages"] == asked["key-usages"].split(",")
        assert allowed.get("isCA", False) is False
        assert policies[f"ryzanstein-{name}"]["constraints"]["maxDuration"] == asked["duration"]
        uses = [each for each in approval if each["kind"] == "Role" and each["metadata"]["name"] == f"ryzanstein-{name}"]
        assert uses[0]["rules"][-1]["resourceNames"] == [f"ryzanstein-{name}"]
        (bound,) = [
            each for each in approval if each["kind"] == "RoleBinding" and each["metadata"]["name"] == f"ryzanstein-{name}"
        ]
        assert [subject["name"] for subject in bound["subjects"]] == [spec["serviceAccountName"]]
        assert bound["roleRef"]["name"] == f"ryzanstein-{name}"
