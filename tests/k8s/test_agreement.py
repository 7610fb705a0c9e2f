"""The manifests and the code name the same ports, health services, variables, flags and metrics."""

from __future__ import annotations

import re
from typing import Any

import pytest
from typer.testing import CliRunner

from ryzanstein.cli.main import build
from ryzanstein.config import ServiceSettings
from ryzanstein.orchestrator.config import OrchestratorSettings
from ryzanstein.router.config import RouterSettings
from ryzanstein.router.telemetry import RouterTelemetry
from ryzanstein.rpc.server import READINESS, STARTUP
from ryzanstein.worker.config import WorkerSettings

Document = dict[str, Any]
SETTINGS: dict[str, type[ServiceSettings]] = {
    "router": RouterSettings,
    "orchestrator": OrchestratorSettings,
    "worker": WorkerSettings,
}
NAMES = tuple(SETTINGS)
PREFIX = "RYZANSTEIN_"


def container(workloads: dict[str, Document], name: str) -> Document:
    (only,) = workloads[name]["spec"]["template"]["spec"]["containers"]
    return dict(only)


def variables(workloads: dict[str, Document], name: str) -> dict[str, str]:
    """As the pod would see them: the pod's name filled in, references resolved in order."""
    seen: dict[str, str] = {}
    for each in container(workloads, name)["env"]:
        value = each.get("value", f"{name}-0")
        seen[each["name"]] = re.sub(r"\$\((\w+)\)", lambda match: seen[match.group(1)], value)
    return seen


@pytest.fixture
def settings(workloads: dict[str, Document], monkeypatch: pytest.MonkeyPatch) -> dict[str, ServiceSettings]:
    """What each service would read in its pod."""
    read = {}
    for name, kind in SETTINGS.items():
        with monkeypatch.context() as environment:
            for key, value in variables(workloads, name).items():
                environment.setenv(key, value)
            read[name] = kind()
    return read


@pytest.mark.parametrize("name", NAMES)
def test_every_variable_is_a_setting_of_the_service(workloads: dict[str, Document], name: str) -> None:
    fields = {PREFIX + field.upper() for field in SETTINGS[name].model_fields}
    assert variables(workloads, name).keys() <= fields


@pytest.mark.parametrize("name", NAMES)
def test_ports_and_probes_are_where_the_service_listens(
    workloads: dict[str, Document], settings: dict[str, ServiceSettings], name: str
) -> None:
    pod, read = container(workloads, name), settings[name].model_dump()
    ports = {port["name"]: port["containerPort"] for port in pod["ports"]}
    assert ports == {port: read[f"{port}_port"] for port in ports}
    assert {"grpc", "metrics", "health"} <= ports.keys()
    assert read["host"] == "0.0.0.0"
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert pod[probe]["grpc"]["port"] == read["health_port"] == 9091


@pytest.mark.parametrize("name", NAMES)
def test_probes_ask_the_health_services_that_the_code_sets(workloads: dict[str, Document], name: str) -> None:
    pod = container(workloads, name)
    # A node says itself whether its start moves; a probe with a time limit would end a large model's.
    assert pod["startupProbe"]["grpc"].get("service", "") == ("" if name == "worker" else STARTUP)
    assert pod["readinessProbe"]["grpc"]["service"] == READINESS
    assert pod["livenessProbe"]["grpc"].get("service", "") == ""


def test_services_expose_what_the_settings_of_others_point_at(
    manifests: list[Document], settings: dict[str, ServiceSettings]
) -> None:
    exposed = {
        f"{service['metadata']['name']}:{port['port']}"
        for service in manifests
        if service["kind"] == "Service"
        for port in service["spec"]["ports"]
    }
    router, worker = settings["router"], settings["worker"]
    assert isinstance(router, RouterSettings)
    assert isinstance(worker, WorkerSettings)
    assert router.orchestrator in exposed
    assert worker.orchestrator in exposed
    assert worker.advertise_address == f"worker-0.worker:{worker.grpc_port}"
    assert f"router:{router.grpc_port}" in exposed
    assert f"router:{router.http_port}" in exposed


@pytest.mark.parametrize("name", NAMES)
def test_the_grace_to_end_is_longer_than_all_that_may_run_before(
    workloads: dict[str, Document], settings: dict[str, ServiceSettings], name: str
) -> None:
    hook = container(workloads, name).get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", ["", "0"])
    grace_s = workloads[name]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert grace_s > float(hook[-1]) + settings[name].drain_grace_s


def test_the_drain_hook_is_a_command_that_exists_and_asks_this_node(
    workloads: dict[str, Document], settings: dict[str, ServiceSettings]
) -> None:
    command = container(workloads, "worker")["lifecycle"]["preStop"]["exec"]["command"]
    direct = command[command.index("--direct") + 1]
    assert direct == f"127.0.0.1:{settings['worker'].model_dump()['grpc_port']}"
    assert command[0] == "ryzanstein"
    help_text = CliRunner().invoke(build(), [command[1], "--help"], env={"COLUMNS": "200"}).output
    assert all(flag in help_text for flag in command if flag.startswith("--"))


@pytest.mark.parametrize("name", NAMES)
def test_arguments_name_a_subcommand(workloads: dict[str, Document], name: str) -> None:
    assert container(workloads, name)["args"] == [name]
    assert f" {name} " in CliRunner().invoke(build(), ["--help"], env={"COLUMNS": "200"}).output


def test_kubelet_evicts_no_router_for_what_it_writes(
    workloads: dict[str, Document], settings: dict[str, ServiceSettings]
) -> None:
    router = settings["router"]
    assert isinstance(router, RouterSettings)
    (volume,) = [each for each in workloads["router"]["spec"]["template"]["spec"]["volumes"] if each["name"] == "state"]
    assert router.disk_bytes < quantity(volume["emptyDir"]["sizeLimit"])
    requested = quantity(container(workloads, "router")["resources"]["requests"]["ephemeral-storage"])
    logs, temporary = 50 * 2**20, 64 * 2**20
    assert router.disk_bytes + logs + temporary < requested


def quantity(text: str) -> int:
    """Returns the bytes of a Kubernetes quantity such as 2Gi."""
    number, unit = text[:-2], text[-2:]
    return int(number) * {"Mi": 2**20, "Gi": 2**30}[unit]


def test_state_is_on_volumes_because_the_root_is_read_only(
    workloads: dict[str, Document], settings: dict[str, ServiceSettings]
) -> None:
    directories = {
        "router": settings["router"].model_dump()["state_dir"],
        "orchestrator": settings["orchestrator"].model_dump()["database"].parent,
    }
    for name, directory in directories.items():
        assert str(directory) in {mount["mountPath"] for mount in container(workloads, name)["volumeMounts"]}


def test_the_router_scales_on_a_metric_that_it_has(manifests: list[Document]) -> None:
    (scaler,) = [each for each in manifests if each["kind"] == "HorizontalPodAutoscaler"]
    wanted = [metric["pods"]["metric"]["name"] for metric in scaler["spec"]["metrics"] if metric["type"] == "Pods"]
    exported = {sample.name for family in RouterTelemetry().registry.collect() for sample in family.samples}
    assert wanted
    assert set(wanted) <= exported


def test_with_redis_a_router_says_where_it_is_found_and_its_variables_are_settings(with_redis: list[Document]) -> None:
    (router,) = [each for each in with_redis if each["kind"] == "Deployment" and each["metadata"]["name"] == "router"]
    (pod,) = router["spec"]["template"]["spec"]["containers"]
    by_name = {each["name"]: each for each in pod["env"]}
    names = [each["name"] for each in pod["env"]]
    assert {name for name in names if name.startswith(PREFIX)} <= {
        PREFIX + field.upper() for field in RouterSettings.model_fields
    }
    # A reference is resolved only when its variable stands before it.
    assert names.index("POD_IP") < names.index("RYZANSTEIN_ROUTER_ADDRESS")
    assert by_name["RYZANSTEIN_ROUTER_ADDRESS"]["value"] == "$(POD_IP)", "of either family, without a port"
    assert by_name["RYZANSTEIN_SESSION_STORE"]["value"] == "redis"
    assert "value" not in by_name["RYZANSTEIN_REDIS_URL"], "the address has a password: it comes from a Secret"
