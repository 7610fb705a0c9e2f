"""The bounds of what nodes and operators may send. Each violation names the field and its bound."""

from __future__ import annotations

import re

from ryzanstein import errors
from ryzanstein.cluster import Deployment, Node
from ryzanstein.generation import MAX_NAME_CHARS

MAX_PATH_CHARS = 1024
MAX_TP = 1024

_NODE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.%]{2,64}\]|[A-Za-z0-9]([A-Za-z0-9.-]{0,253}[A-Za-z0-9])?):([0-9]{1,5})")


def check_node_id(node_id: str, field: str = "node_id") -> None:
    if not _NODE_ID.fullmatch(node_id):
        description = "must have 1 to 128 letters, digits, '.', '_' or '-', and start with a letter or digit"
        raise errors.invalid(field, description, node_id[:160])


def check_node(node: Node) -> None:
    """Checks a registration."""
    check_node_id(node.node_id, "node.node_id")
    match = _ADDRESS.fullmatch(node.address)
    if match is None or not 1 <= int(match[3]) <= 65535:
        raise errors.invalid("node.address", "must be host:port with a port in [1, 65535]", node.address[:160])
    _check_name(node.incarnation, "node.incarnation")
    if not 1 <= node.tp <= MAX_TP:
        raise errors.invalid("node.tp", f"must be in [1, {MAX_TP}]", node.tp)
    check_model(node.model, "node.model")


def check_model(model: str, field: str) -> None:
    """Checks the model that a node reports; empty while it has none."""
    if len(model) > MAX_NAME_CHARS:
        raise errors.invalid(field, f"must have at most {MAX_NAME_CHARS} characters", len(model))


def check_deployment(deployment: Deployment, max_nodes: int) -> None:
    _check_name(deployment.model, "deployment.model")
    if not 1 <= len(deployment.path) <= MAX_PATH_CHARS:
        raise errors.invalid("deployment.path", f"must have 1 to {MAX_PATH_CHARS} characters", len(deployment.path))
    if "\0" in deployment.path:
        raise errors.invalid("deployment.path", "must not contain NUL")
    if deployment.replicas > max_nodes:
        raise errors.invalid("deployment.replicas", f"must be in [0, {max_nodes}]", deployment.replicas)


def _check_name(value: str, field: str) -> None:
    if not 1 <= len(value) <= MAX_NAME_CHARS:
        raise errors.invalid(field, f"must have 1 to {MAX_NAME_CHARS} characters", len(value))
