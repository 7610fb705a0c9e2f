"""Every document is valid to the letter, and every pod is locked down."""

from __future__ import annotations

import json
import re
from typing import Any

import kubernetes_validate

from ryzanstein.router.config import RouterSettings

Document = dict[str, Any]

KUBERNETES = "1.32"


def containers(workload: Document) -> list[Document]:
    return list(workload["spec"]["template"]["spec"]["containers"])


def pod(workload: Document) -> Document:
    return dict(workload["spec"]["template"]["spec"])


def selects(selector: Document, labels: dict[str, str]) -> bool:
    """Whether a label selector picks these labels."""
    exact = all(labels.get(key) == value for key, value in selector.get("matchLabels", {}).items())
    return exact and all(labels.get(rule["key"]) in rule["values"] for rule in selector.get("matchExpressions", []))


def test_every_document_is_valid_strictly(manifests: list[Document]) -> None:
    assert {"Deployment", "Service"} <= {document["kind"] for document in manifests}
    for document in manifests:
        kubernetes_validate.validate(document, KUBERNETES, strict=True)


def test_the_network_policy_of_the_component_is_valid_strictly(with_pod_monitor: list[Document]) -> None:
    assert "NetworkPolicy" in {document["kind"] for document in with_pod_monitor}
    for document in with_pod_monitor:
        if document["kind"] != "PodMonitor":  # its schema is a custom resource's
            kubernetes_validate.validate(document, KUBERNETES, strict=True)


def test_no_document_is_there_twice(manifests: list[Document]) -> None:
    names = [(each["kind"], each["metadata"]["name"]) for each in manifests]
    assert len(names) == len(set(names))


def test_the_three_services_run_as_conventions_say(workloads: dict[str, Document]) -> None:
    assert workloads["router"]["kind"] == "Deployment"
    assert workloads["orchestrator"]["spec"]["replicas"] == 1
    assert workloads["orchestrator"]["spec"]["strategy"] == {"type": "Recreate"}
    assert workloads["worker"]["kind"] == "StatefulSet"
    assert workloads["worker"]["spec"]["podManagementPolicy"] == "Parallel"


def test_the_namespace_enforces_restricted_pods(manifests: list[Document]) -> None:
    (namespace,) = [each for each in manifests if each["kind"] == "Namespace"]
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    assert all(each["metadata"]["namespace"] == namespace["metadata"]["name"] for each in manifests if each is not namespace)


def test_every_pod_meets_the_restricted_profile_with_a_read_only_root(workloads: dict[str, Document]) -> None:
    for workload in workloads.values():
        security = pod(workload)["securityContext"]
        assert security["runAsNonRoot"] is True
        assert security["runAsUser"] > 0
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in containers(workload):
            own = container["securityContext"]
            assert own["allowPrivilegeEscalation"] is False
            assert own["readOnlyRootFilesystem"] is True
            assert own["capabilities"] == {"drop": ["ALL"]}


def test_no_pod_gets_a_service_account_token_or_service_links(
    manifests: list[Document], workloads: dict[str, Document]
) -> None:
    accounts = {each["metadata"]["name"]: each for each in manifests if each["kind"] == "ServiceAccount"}
    for workload in workloads.values():
        assert pod(workload)["automountServiceAccountToken"] is False
        assert accounts[pod(workload)["serviceAccountName"]]["automountServiceAccountToken"] is False
        # Service links would add variables like RYZANSTEIN_..., which settings would read.
        assert pod(workload)["enableServiceLinks"] is False


def test_every_container_asks_for_cpu_and_memory_and_has_a_memory_limit(workloads: dict[str, Document]) -> None:
    for workload in workloads.values():
        for container in containers(workload):
            assert {"cpu", "memory"} <= container["resources"]["requests"].keys()
            assert "memory" in container["resources"]["limits"]


def test_every_mount_has_a_volume_and_every_claim_exists_or_is_the_operators(
    manifests: list[Document], workloads: dict[str, Document]
) -> None:
    claims = {each["metadata"]["name"] for each in manifests if each["kind"] == "PersistentVolumeClaim"} | {"models"}
    for workload in workloads.values():
        volumes = {volume["name"]: volume for volume in pod(workload)["volumes"]}
        for container in containers(workload):
            assert {mount["name"] for mount in container["volumeMounts"]} == volumes.keys()
        wanted = {
            volume["persistentVolumeClaim"]["claimName"] for volume in volumes.values() if "persistentVolumeClaim" in volume
        }
        assert wanted <= claims


def test_a_router_stays_within_its_memory(workloads: dict[str, Document]) -> None:
    """The sum in docs/operate/configure.md, with the settings as they are."""
    bounds = {name: field.default for name, field in RouterSettings.model_fields.items()}
    sums = 2 * bounds["http_max_arriving_bytes"] + 2 * bounds["max_held_prompt_bytes"] + bounds["http_max_leaving_bytes"]
    sums += 130 * 2**20 + 180 * bounds["max_retained_tokens"]
    (container,) = workloads["router"]["spec"]["template"]["spec"]["containers"]
    limit = container["resources"]["limits"]["memory"]
    assert limit.endswith("Gi")
    assert sums < int(limit.removesuffix("Gi")) * 2**30


def test_ranks_share_memory_that_is_memory(workloads: dict[str, Document]) -> None:
    worker = workloads["worker"]
    mounts = {mount["mountPath"]: mount["name"] for mount in containers(worker)[0]["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod(worker)["volumes"]}
    assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"


def test_routers_and_workers_spread_over_hosts_and_zones(workloads: dict[str, Document]) -> None:
    for name in ("router", "worker"):
        keys = {rule["topologyKey"] for rule in pod(workloads[name])["topologySpreadConstraints"]}
        assert keys == {"kubernetes.io/hostname", "topology.kubernetes.io/zone"}
    told = {each["name"]: each.get("valueFrom", {}).get("fieldRef", {}) for each in containers(workloads["worker"])[0]["env"]}
    assert told["RYZANSTEIN_NODE_HOST"]["fieldPath"] == "spec.nodeName"
    assert told["RYZANSTEIN_NODE_ZONE"]["fieldPath"] == "metadata.labels['topology.kubernetes.io/zone']"


def test_disruptions_and_scaling_leave_routers_serving(manifests: list[Document]) -> None:
    by_kind = {(each["kind"], each["metadata"]["name"]): each for each in manifests}
    assert by_kind["PodDisruptionBudget", "router"]["spec"]["minAvailable"] >= 1
    assert by_kind["PodDisruptionBudget", "worker"]["spec"]["maxUnavailable"] == 1
    scaler = by_kind["HorizontalPodAutoscaler", "router"]["spec"]
    assert scaler["minReplicas"] >= 2
    assert "replicas" not in by_kind["Deployment", "router"]["spec"]


def test_selectors_pick_the_pods_that_they_are_for(manifests: list[Document], workloads: dict[str, Document]) -> None:
    labels = {name: workload["spec"]["template"]["metadata"]["labels"] for name, workload in workloads.items()}
    for document in manifests:
        name = document["metadata"]["name"]
        if document["kind"] == "Service":
            assert selects({"matchLabels": document["spec"]["selector"]}, labels[name])
        if document["kind"] in {"PodDisruptionBudget", "Deployment", "StatefulSet"}:
            assert [each for each in labels if selects(document["spec"]["selector"], labels[each])] == [name]
    assert workloads["worker"]["spec"]["serviceName"] in {
        each["metadata"]["name"] for each in manifests if each["kind"] == "Service"
    }


def test_only_the_gpu_overlay_asks_for_gpus_one_for_each_rank(manifests: list[Document]) -> None:
    (worker,) = [each for each in manifests if each["kind"] == "StatefulSet"]
    (container,) = containers(worker)
    env = {each["name"]: each.get("value") for each in container["env"]}
    gpus = container["resources"]["limits"].get("nvidia.com/gpu")
    assert gpus == (int(env["RYZANSTEIN_TP"]) if env.get("RYZANSTEIN_DEVICE") == "cuda" else None)
    assert container["image"].endswith("-cu130" if gpus else "-cpu")
    has_demo = env["RYZANSTEIN_MODEL"].endswith("demo")
    assert ("persistentVolumeClaim" in str(pod(worker)["volumes"])) is not has_demo


def test_alerts_find_the_jobs_that_the_pod_monitor_names(
    with_monitoring: list[Document], workloads: dict[str, Document]
) -> None:
    """`up{job="router"}` is of the routers because a pod's name is the job."""
    (monitor,) = [each for each in with_monitoring if each["kind"] == "PodMonitor"]
    label = monitor["spec"]["jobLabel"]
    jobs = {each["spec"]["template"]["metadata"]["labels"][label] for each in workloads.values()}
    rules = [each for each in with_monitoring if each["kind"] == "PrometheusRule"]
    asked = set(re.findall(r'job="(\w+)"', str(rules)))
    assert {"router", "orchestrator"} <= asked <= jobs


def test_the_sidecar_of_grafana_finds_the_dashboards(with_monitoring: list[Document]) -> None:
    (dashboards,) = [each for each in with_monitoring if each["metadata"]["name"] == "ryzanstein-dashboards"]
    kubernetes_validate.validate(dashboards, KUBERNETES, strict=True)
    assert dashboards["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert {json.loads(text)["uid"] for text in dashboards["data"].values()} == {
        f"ryzanstein-{name.removesuffix('.json')}" for name in dashboards["data"]
    }
