"""The errors of deployments that no node can take, or that would leave too few replicas."""

from __future__ import annotations

from collections.abc import Sequence

from ryzanstein import errors
from ryzanstein.cluster import Deployment
from ryzanstein.orchestrator.placing.packing import NodeShortage

_MAX_NODES_LISTED = 8
_MAX_REASON_CHARS = 160


def unplaceable(deployment: Deployment, shortages: Sequence[NodeShortage]) -> errors.RyzansteinError:
    """Returns the error for a deployment that fits nowhere. `shortages` has an entry per node.

    The message and the metadata have the nodes that lack the least memory.
    """
    lacking = sorted((each for each in shortages if each.missing_bytes), key=lambda each: each.missing_bytes)
    visible = (lacking or list(shortages))[:_MAX_NODES_LISTED]
    nodes = "; ".join(f"{each.node_id}: {each.reason[:_MAX_REASON_CHARS]}" for each in visible)
    rest = len(shortages) - len(visible)
    others = f"; and {rest} more" if rest else ""
    message = f"no node can serve {deployment.model!r} from {deployment.path[:256]}: {nodes}{others}"
    if not lacking:
        return errors.failed_precondition("MODEL_REFUSED", message)
    missing = {each.node_id: str(each.missing_bytes) for each in visible}
    return errors.RyzansteinError(message, errors.Code.RESOURCE_EXHAUSTED, "MODEL_DOES_NOT_FIT", missing)


def irreplaceable(deployment: Deployment, why: str) -> errors.RyzansteinError:
    """Returns the error for a revision to which no node could change."""
    message = f"no replica of {deployment.model!r} could be replaced: {why}"
    return errors.failed_precondition("CANNOT_BE_REPLACED", message)


def below_minimum(node_id: str, deployment: Deployment, left: int) -> errors.RyzansteinError:
    """Returns the error for a drain that would leave `left` ready replicas of a deployment, fewer than it states."""
    model, least = deployment.model, deployment.min_replicas
    message = f"{node_id} does not drain: {left} ready replicas of {model!r} would be left, and its min_replicas is {least}"
    facts = {"model": model, "field": "deployment.min_replicas", "bound": str(least), "left": str(left)}
    violation = errors.FieldViolation("deployment.min_replicas", f"{least} replicas must stay ready")
    return errors.RyzansteinError(message, errors.Code.FAILED_PRECONDITION, "BELOW_MIN_REPLICAS", facts, (violation,))
