"""vLLM beside the nodes, and nodes in reserve, as an operator's overlay renders them. Neither has run in a cluster."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
from tests.k8s.test_network import allowed

from ryzanstein.rpc.server import ENGINE
from ryzanstein.worker.config import WorkerSettings

Document = dict[str, Any]
Overlay = Callable[..., list[Document]]


def workload(manifests: list[Document], name: str) -> Document:
    (found,) = [each for each in manifests if each["kind"] == "StatefulSet" and each["metadata"]["name"] == name]
    return dict(deepcopy(found["spec"]["template"]["spec"]))


def settings_of(pod: Document, monkeypatch: pytest.MonkeyPatch, node_id: str) -> WorkerSettings:
    (container,) = pod["containers"]
    seen: dict[str, str] = {}
    for each in container["env"]:
        seen[each["name"]] = re.sub(r"\$\((\w+)\)", lambda match: seen[match.group(1)], each.get("value", node_id))
    for name, value in seen.items():
        monkeypatch.setenv(name, value)
    return WorkerSettings(_env_file=None)  # type: ignore[call-arg]


def test_the_agent_finds_vllm_on_the_socket_that_they_share(overlay: Overlay, monkeypatch: pytest.MonkeyPatch) -> None:
    pod = workload(overlay("base", "vllm"), "worker")
    settings = settings_of(pod, monkeypatch, "worker-0")
    engine = next(each for each in pod["initContainers"] if each["name"] == "vllm")
    assert engine["restartPolicy"] == "Always", "a sidecar, which lives as long as the agent"
    (socket,) = [arg.partition("=")[2] for arg in engine["args"] if arg.startswith("--uds=")]
    assert settings.engine == f"unix://{socket}"
    shared = [mount["name"] for mount in engine["volumeMounts"] if socket.startswith(mount["mountPath"] + "/")]
    (agent,) = pod["containers"]
    assert shared == [mount["name"] for mount in agent["volumeMounts"] if socket.startswith(mount["mountPath"] + "/")]
    assert len(shared) == 1
    assert settings.model == engine["command"][2]


def test_kubelet_asks_the_agent_whether_vllm_hangs(overlay: Overlay, monkeypatch: pytest.MonkeyPatch) -> None:
    pod = workload(overlay("base", "vllm"), "worker")
    engine = next(each for each in pod["initContainers"] if each["name"] == "vllm")
    settings = settings_of(pod, monkeypatch, "worker-0")
    assert engine["livenessProbe"]["grpc"] == {"port": settings.health_port, "service": ENGINE}


def test_vllm_loads_the_sampler_that_the_plug_in_brings(overlay: Overlay) -> None:
    pod = workload(overlay("base", "vllm"), "worker")
    plugin, engine = pod["initContainers"]
    assert plugin["name"] == "plugin", "before vLLM starts"
    (mount,) = [each for each in engine["volumeMounts"] if each["name"] == plugin["volumeMounts"][0]["name"]]
    assert {"name": "PYTHONPATH", "value": mount["mountPath"]} in engine["env"]
    (processor,) = [arg.partition("=")[2] for arg in engine["args"] if arg.startswith("--logits-processors=")]
    module, _, name = processor.partition(":")
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    with open(spec.origin) as source:
        assert f"class {name}(" in source.read()


def test_only_vllm_takes_gpus_and_only_where_it_is_asked_for(overlay: Overlay) -> None:
    assert "nvidia.com/gpu" not in str(overlay("base"))
    (agent,) = workload(overlay("base", "vllm"), "worker")["containers"]
    assert "nvidia.com/gpu" not in str(agent)


def test_nodes_in_reserve_are_those_of_the_base_but_for_the_setting(overlay: Overlay, monkeypatch: pytest.MonkeyPatch) -> None:
    manifests = overlay("base", "vllm", "reserve")
    reserve, base = workload(manifests, "reserve"), workload(overlay("base"), "worker")
    (ours,), (theirs,) = reserve.pop("containers"), base.pop("containers")
    assert (ours.pop("name"), theirs.pop("name")) == ("reserve", "worker")
    for pod in (reserve, base):
        for spread in pod["topologySpreadConstraints"]:
            spread.pop("labelSelector")
    assert reserve == base
    their_env = theirs.pop("env")
    more = [each for each in ours.pop("env") if each not in their_env]
    assert ours == theirs
    assert {each["name"] for each in more} == {
        "RYZANSTEIN_RESERVE",
        "RYZANSTEIN_DEVICE",
        "RYZANSTEIN_ADVERTISE_ADDRESS",
    }
    settings = settings_of(workload(manifests, "reserve"), monkeypatch, "reserve-0")
    assert settings.reserve
    assert settings.has_ranks


def test_nodes_in_reserve_are_reached_like_the_others(overlay: Overlay) -> None:
    manifests = overlay("base", "vllm", "reserve")
    needed = {("router", "reserve"), ("reserve", "orchestrator"), ("reserve", "worker"), ("worker", "reserve")}
    pods = ("router", "orchestrator", "worker", "reserve")
    open_flows = {(source, target) for source in pods for target in pods if allowed(manifests, source, target, "grpc")}
    of_the_base = {("router", "worker"), ("router", "orchestrator"), ("worker", "orchestrator"), ("worker", "worker")}
    assert open_flows == of_the_base | needed | {("reserve", "reserve")}
