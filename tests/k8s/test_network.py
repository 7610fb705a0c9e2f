"""Who may speak to whom, computed from the policies as a network plugin would."""

from __future__ import annotations

from typing import Any

import pytest

Document = dict[str, Any]
PODS = ("router", "orchestrator", "worker")


def matches(selector: Document, name: str) -> bool:
    exact = selector.get("matchLabels", {}).get("app.kubernetes.io/name", name) == name
    return exact and all(name in rule["values"] for rule in selector.get("matchExpressions", []))


def policies_for(manifests: list[Document], name: str, direction: str) -> list[Document]:
    policies = [each["spec"] for each in manifests if each["kind"] == "NetworkPolicy"]
    return [spec for spec in policies if direction in spec["policyTypes"] and matches(spec["podSelector"], name)]


def admits(rule: Document, peers: str, other: str, port: str) -> bool:
    """Whether one rule lets a pod of our namespace through."""
    ports = [each["port"] for each in rule["ports"]]
    sides = rule.get(peers)
    return port in ports and (
        sides is None or any("namespaceSelector" not in side and matches(side["podSelector"], other) for side in sides)
    )


def allowed(manifests: list[Document], source: str, target: str, port: str) -> bool:
    out = [rule for spec in policies_for(manifests, source, "Egress") for rule in spec.get("egress", [])]
    into = [rule for spec in policies_for(manifests, target, "Ingress") for rule in spec.get("ingress", [])]
    return any(admits(rule, "to", target, port) for rule in out) and any(admits(rule, "from", source, port) for rule in into)


NEEDED = {("router", "worker"), ("router", "orchestrator"), ("worker", "orchestrator"), ("worker", "worker")}


@pytest.mark.parametrize("source", PODS)
@pytest.mark.parametrize("target", PODS)
def test_only_the_needed_flows_between_services_are_open(manifests: list[Document], source: str, target: str) -> None:
    assert allowed(manifests, source, target, "grpc") == ((source, target) in NEEDED)


@pytest.mark.parametrize("name", PODS)
def test_every_pod_is_denied_what_is_not_allowed_in_both_directions(manifests: list[Document], name: str) -> None:
    empty = [each for each in manifests if each["kind"] == "NetworkPolicy" and each["spec"]["podSelector"] == {}]
    denying = [each["spec"]["policyTypes"] for each in empty if "ingress" not in each["spec"] and "egress" not in each["spec"]]
    assert denying == [["Ingress", "Egress"]]
    assert policies_for(manifests, name, "Ingress")
    assert policies_for(manifests, name, "Egress")


def test_clients_from_anywhere_reach_both_faces_of_the_router_and_nothing_else(manifests: list[Document]) -> None:
    open_ports = {
        (name, port["port"])
        for name in PODS
        for spec in policies_for(manifests, name, "Ingress")
        for rule in spec.get("ingress", [])
        if "from" not in rule
        for port in rule["ports"]
    }
    assert open_ports == {("router", "grpc"), ("router", "http")}


def test_no_rule_opens_the_ports_of_probes_which_kubelet_reaches_without(with_everything: list[Document]) -> None:
    """Kubernetes: traffic between a pod and the machine that it runs on is always allowed."""
    named = {
        port["port"]
        for each in with_everything
        if each["kind"] == "NetworkPolicy"
        for direction in ("ingress", "egress")
        for rule in each["spec"].get(direction, [])
        for port in rule.get("ports", [])
    }
    assert {"grpc", "http", "peers", "tls", "metrics"} <= named
    assert not named & {"health", 9091}
    services = [each for each in with_everything if each["kind"] == "Service"]
    assert not [port for each in services for port in each["spec"]["ports"] if port["targetPort"] in ("health", "metrics")]


def test_with_tls_the_same_ways_are_open_at_the_ports_with_tls_and_one_from_router_to_router(with_tls: list[Document]) -> None:
    flows = {(source, target) for source in PODS for target in PODS if allowed(with_tls, source, target, "tls")}
    assert flows == NEEDED | {("router", "router")}
    assert {(s, t) for s in PODS for t in PODS if allowed(with_tls, s, t, "grpc")} == NEEDED
    (router,) = [each for each in with_tls if each["kind"] == "Service" and each["metadata"]["name"] == "router"]
    assert {port["targetPort"] for port in router["spec"]["ports"]} == {"grpc", "http"}


def test_the_monitoring_namespace_reaches_the_metrics_ports_that_the_pod_monitor_names(
    with_pod_monitor: list[Document],
) -> None:
    (monitor,) = [each for each in with_pod_monitor if each["kind"] == "PodMonitor"]
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    workloads = [each for each in with_pod_monitor if each["kind"] in {"Deployment", "StatefulSet"}]
    assert {each["metadata"]["name"] for each in workloads} == set(PODS)
    for workload in workloads:
        name = workload["metadata"]["name"]
        (container,) = workload["spec"]["template"]["spec"]["containers"]
        assert endpoint["port"] in {port["name"] for port in container["ports"]}
        assert matches(monitor["spec"]["selector"], name)
        rules = [rule for spec in policies_for(with_pod_monitor, name, "Ingress") for rule in spec.get("ingress", [])]
        assert any(port["port"] == endpoint["port"] and "from" in rule for rule in rules for port in rule["ports"])


def test_with_redis_routers_reach_it_and_each_other_and_nothing_else_is_opened(with_redis: list[Document]) -> None:
    flows = {(source, target) for source in PODS for target in PODS if allowed(with_redis, source, target, "grpc")}
    assert flows == NEEDED
    peers = {(source, target) for source in PODS for target in PODS if allowed(with_redis, source, target, "peers")}
    assert peers == {("router", "router")}
    out = {
        name: [rule for spec in policies_for(with_redis, name, "Egress") for rule in spec.get("egress", [])] for name in PODS
    }
    assert [name for name in PODS if any(admits(rule, "to", "redis", "6379") for rule in _as_text(out[name]))] == ["router"]


def test_with_everything_strangers_reach_the_faces_alone_and_routers_alone_the_port_for_routers(
    with_everything: list[Document],
) -> None:
    rules = [
        (name, rule)
        for name in PODS
        for spec in policies_for(with_everything, name, "Ingress")
        for rule in spec.get("ingress", [])
    ]
    assert {(name, port["port"]) for name, rule in rules if "from" not in rule for port in rule["ports"]} == {
        ("router", "grpc"),
        ("router", "http"),
    }
    peers = {(source, target) for source in PODS for target in PODS if allowed(with_everything, source, target, "peers")}
    assert peers == {("router", "router")}
    # From another namespace comes the one that collects metrics, to the port of metrics.
    abroad = [rule for _, rule in rules if any("namespaceSelector" in side for side in rule.get("from", []))]
    assert {port["port"] for rule in abroad for port in rule["ports"]} == {"metrics"}
    (service,) = [each for each in with_everything if each["kind"] == "Service" and each["metadata"]["name"] == "router"]
    assert {port["targetPort"] for port in service["spec"]["ports"]} == {"grpc", "http"}


def test_with_traces_those_that_send_them_reach_the_collector_that_they_are_told(with_traces: list[Document]) -> None:
    given: dict[str, list[str]] = {}
    reach: dict[str, list[int]] = {name: [] for name in PODS}
    for workload in (each for each in with_traces if each["kind"] in {"Deployment", "StatefulSet"}):
        name = workload["metadata"]["name"]
        (container,) = workload["spec"]["template"]["spec"]["containers"]
        given[name] = [each["value"] for each in container.get("env", []) if each["name"] == "RYZANSTEIN_OTLP_ENDPOINT"]
        rules = [rule for spec in policies_for(with_traces, name, "Egress") for rule in spec.get("egress", [])]
        for rule in rules:
            namespaces = [side.get("namespaceSelector", {}).get("matchLabels", {}) for side in rule["to"]]
            if {"kubernetes.io/metadata.name": "monitoring"} in namespaces:
                reach[name] += [port["port"] for port in rule["ports"]]
    collector = "otel-collector.monitoring:4317"
    assert given == {"router": [collector], "worker": [collector], "orchestrator": []}
    assert reach == {"router": [4317], "worker": [4317], "orchestrator": []}
    flows = {(source, target) for source in PODS for target in PODS if allowed(with_traces, source, target, "grpc")}
    assert flows == NEEDED


def _as_text(rules: list[Document]) -> list[Document]:
    return [{**rule, "ports": [{"port": str(port["port"])} for port in rule["ports"]]} for rule in rules]
