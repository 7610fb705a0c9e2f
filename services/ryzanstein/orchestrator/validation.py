"""The bounds of what nodes and operators may send. Each violation names the field and its bound."""

from __future__ import annotations

import re
from collections.abc import Sized

from ryzanstein import errors
from ryzanstein.adapters import DeployedAdapter
from ryzanstein.cluster import MAX_PLACE_CHARS, Deployment, ModelNeed, ModelReport, Node, NodeReport, RolloutLimits
from ryzanstein.generation.prompts import MAX_NAME_CHARS, name_fault

MAX_PATH_CHARS = 1024
MAX_TP = 1024
MAX_MODELS = 32
MAX_NEEDS = 16
MAX_STARTS = 2 * MAX_MODELS
MAX_REASON_CHARS = 1024
MAX_BYTES = 2**63 - 1
MAX_NODE_TEXT_CHARS = 16384
"""All paths and reasons of a node's models together."""
MAX_IDLE_UNLOAD_S = 30 * 86400.0
MAX_IDEMPOTENCY_KEY_CHARS = 64
MAX_MIN_READY_S = 3600.0
MAX_PROGRESS_S = 86_400.0

_NODE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.%]{2,64}\]|[A-Za-z0-9]([A-Za-z0-9.-]{0,253}[A-Za-z0-9])?):([0-9]{1,5})")


def check_node_id(node_id: str, field: str = "node_id") -> None:
    if not _NODE_ID.fullmatch(node_id):
        description = "must have 1 to 128 letters, digits, '.', '_' or '-', and start with a letter or digit"
        raise errors.invalid(field, description, node_id[:160])


def check_node(node: Node) -> None:
    """Checks a registration."""
    check_node_id(node.node_id, "node.node_id")
    _check_address(node.address, "node.address")
    if node.tls_address:
        _check_address(node.tls_address, "node.tls_address")
    _check_name(node.incarnation, "node.incarnation")
    if not 1 <= node.tp <= MAX_TP:
        raise errors.invalid("node.tp", f"must be in [1, {MAX_TP}]", node.tp)
    check_model(node.model, "node.model")
    _check_length(node.host, MAX_PLACE_CHARS, "node.host")
    _check_length(node.zone, MAX_PLACE_CHARS, "node.zone")
    _check_models(node.models, "node.models")


def _check_address(address: str, field: str) -> None:
    match = _ADDRESS.fullmatch(address)
    if match is None or not 1 <= int(match[3]) <= 65535:
        raise errors.invalid(field, "must be host:port with a port in [1, 65535]", address[:160])


def check_report(report: NodeReport) -> None:
    """Checks what a node sends with a beat."""
    if report.beat is not None:
        check_model(report.beat.model, "beat.model")
    _check_models(report.models, "models")
    _check_count(report.needs, MAX_NEEDS, "needs")
    for number, need in enumerate(report.needs):
        _check_need(need, f"needs[{number}]")
    _check_count(report.starts, MAX_STARTS, "starts")
    for model in report.starts:
        _check_name(model, "starts")


def _check_need(need: ModelNeed, field: str) -> None:
    _check_path(need.path, f"{field}.path")
    _check_length(need.error, MAX_REASON_CHARS, f"{field}.error")
    if need.bytes > MAX_BYTES:
        raise errors.invalid(f"{field}.bytes", f"must be in [0, {MAX_BYTES}]", need.bytes)


def _check_models(models: tuple[ModelReport, ...], field: str) -> None:
    _check_count(models, MAX_MODELS, field)
    for number, report in enumerate(models):
        name = f"{field}[{number}]"
        check_model(report.model, f"{name}.model")
        _check_length(report.path, MAX_PATH_CHARS, f"{name}.path")
        _check_length(report.reason, MAX_REASON_CHARS, f"{name}.reason")
        _check_length(report.next_reason, MAX_REASON_CHARS, f"{name}.next_reason")
    if len({report.model for report in models}) < len(models):
        raise errors.invalid(field, "must not name a model twice")
    if sum(len(report.path) + len(report.reason) + len(report.next_reason) for report in models) > MAX_NODE_TEXT_CHARS:
        raise errors.invalid(field, f"must have at most {MAX_NODE_TEXT_CHARS} characters of paths and reasons together")


def check_model(model: str, field: str) -> None:
    """Checks the model that a node reports; empty while it has none."""
    if len(model) > MAX_NAME_CHARS:
        raise errors.invalid(field, f"must have at most {MAX_NAME_CHARS} characters", len(model))


def check_name_of(deployment: Deployment) -> None:
    """Checks the only field that counts when a model is rolled back."""
    _check_name(deployment.model, "deployment.model")


def check_idempotency_key(key: str) -> None:
    _check_length(key, MAX_IDEMPOTENCY_KEY_CHARS, "idempotency_key")


def check_deployment(deployment: Deployment, max_nodes: int) -> None:
    check_name_of(deployment)
    _check_path(deployment.path, "deployment.path")
    if deployment.replicas > max_nodes:
        raise errors.invalid("deployment.replicas", f"must be in [0, {max_nodes}]", deployment.replicas)
    if not 0 <= deployment.idle_unload_s <= MAX_IDLE_UNLOAD_S:
        raise errors.invalid("deployment.idle_unload", f"must be in [0, {MAX_IDLE_UNLOAD_S:.0f}] s", deployment.idle_unload_s)
    _check_replicas(deployment, max_nodes)
    _check_rollout(deployment.rollout)
    rollout = deployment.rollout
    if rollout.max_unavailable == 0 and not rollout.allow_outage and deployment.replicas and not deployment.surge:
        raise errors.invalid(
            "deployment.max_replicas",
            f"must be more than replicas ({deployment.replicas}): with rollout.max_unavailable 0 no replica could be replaced",
            deployment.max_replicas,
        )


def _check_replicas(deployment: Deployment, max_nodes: int) -> None:
    least, wanted, most = deployment.min_replicas, deployment.replicas, deployment.max_replicas
    if most and not (wanted or 1) <= most <= max_nodes:
        description = f"must be 0, or in [{wanted or 1}, {max_nodes}]: at least replicas"
        raise errors.invalid("deployment.max_replicas", description, most)
    bound = deployment.limit or max_nodes
    if least > bound:
        raise errors.invalid("deployment.min_replicas", f"must be in [0, {bound}]: at most replicas and max_replicas", least)


def _check_rollout(limits: RolloutLimits) -> None:
    shares = {"max_unavailable": limits.max_unavailable, "max_failed": limits.max_failed}
    for name, share in shares.items():
        if share is not None and not 0 <= share <= 1:
            raise errors.invalid(f"deployment.rollout.{name}", "must be in [0, 1]", share)
    times = {"min_ready": (limits.min_ready_s, 0.0, MAX_MIN_READY_S), "progress": (limits.progress_s, 1.0, MAX_PROGRESS_S)}
    for name, (given_s, least_s, most_s) in times.items():
        if given_s is not None and not least_s <= given_s <= most_s:
            raise errors.invalid(f"deployment.rollout.{name}", f"must be in [{least_s:.0f}, {most_s:.0f}] s", given_s)


def check_adapter(adapter: DeployedAdapter) -> None:
    if fault := name_fault(adapter.name):
        raise errors.invalid("adapter.name", fault, adapter.name[:160])
    _check_name(adapter.model, "adapter.model")
    _check_path(adapter.path, "adapter.path")
    if adapter.name == adapter.model:
        raise errors.invalid("adapter.name", "must not be the model's own", adapter.name)
    if not adapter.path.startswith("/"):
        raise errors.invalid("adapter.path", "must be absolute", adapter.path[:160])


def _check_path(path: str, field: str) -> None:
    if not 1 <= len(path) <= MAX_PATH_CHARS:
        raise errors.invalid(field, f"must have 1 to {MAX_PATH_CHARS} characters", len(path))
    if "\0" in path:
        raise errors.invalid(field, "must not contain NUL")


def _check_length(text: str, bound: int, field: str) -> None:
    if len(text) > bound:
        raise errors.invalid(field, f"must have at most {bound} characters", len(text))


def _check_count(entries: Sized, bound: int, field: str) -> None:
    if len(entries) > bound:
        raise errors.invalid(field, f"must have at most {bound} entries", len(entries))


def _check_name(value: str, field: str) -> None:
    if not 1 <= len(value) <= MAX_NAME_CHARS:
        raise errors.invalid(field, f"must have 1 to {MAX_NAME_CHARS} characters", len(value))
