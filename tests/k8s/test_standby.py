"""The component that gives the orchestrator a standby."""

from __future__ import annotations

from typing import Any

import kubernetes_validate
import pytest
from tests.k8s.test_network import allowed, policies_for

from ryzanstein.orchestrator.config import OrchestratorSettings

Document = dict[str, Any]


@pytest.fixture(scope="module")
def standby(overlay: Any) -> list[Document]:
    return overlay("base", "standby")


def test_it_is_valid_and_leaves_no_volume_for_one_writer(standby: list[Document]) -> None:
    for document in standby:
        kubernetes_validate.validate(document, "1.32", strict=True)
    assert not [
        each for each in standby if each["kind"] == "PersistentVolumeClaim" and each["metadata"]["name"] == "orchestrator"
    ]


def test_two_orchestrators_share_what_their_settings_need(standby: list[Document]) -> None:
    (workload,) = [each for each in standby if each["kind"] == "Deployment" and each["metadata"]["name"] == "orchestrator"]
    assert (workload["spec"]["replicas"], workload["spec"]["strategy"]["type"]) == (2, "RollingUpdate")
    pod = workload["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert [each["name"] for each in pod["volumes"]] == [each["name"] for each in container["volumeMounts"]] == ["tmp"]
    values = {each["name"]: each.get("value", "redis://redis:6379/0") for each in container["env"]}
    values["RYZANSTEIN_ADVERTISE_ADDRESS"] = "10.0.0.7"
    given = {name.removeprefix("RYZANSTEIN_").lower(): value for name, value in values.items() if name != "POD_IP"}
    settings = OrchestratorSettings(**given)
    assert (settings.leader_election, settings.store) == ("redis", "redis")
    (budget,) = [
        each for each in standby if each["kind"] == "PodDisruptionBudget" and each["metadata"]["name"] == "orchestrator"
    ]
    assert budget["spec"]["minAvailable"] == 1


def test_they_reach_redis_and_nodes_and_routers_reach_both(standby: list[Document]) -> None:
    ports = [
        port["port"]
        for spec in policies_for(standby, "orchestrator", "Egress")
        for rule in spec.get("egress", [])
        for port in rule["ports"]
    ]
    assert 6379 in ports
    assert allowed(standby, "worker", "orchestrator", "grpc")
    assert allowed(standby, "router", "orchestrator", "grpc")
