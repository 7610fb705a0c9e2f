"""Names of models on nodes, as agents and routers form them.

The first model of node-0 has the name of the node, the model b has the name node-0/b.
"""

from __future__ import annotations

from ryzanstein.lab.simulation.plan import FIRST_MODEL


def link_name(node: str, model: str) -> str:
    """Returns the name of a model of a node."""
    return node if model == FIRST_MODEL else f"{node}/{model}"


def split(name: str) -> tuple[str, str]:
    """Returns the node and the model of a name."""
    node, _, model = name.partition("/")
    return node, model or FIRST_MODEL
